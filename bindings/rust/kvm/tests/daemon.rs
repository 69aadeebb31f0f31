// SPDX-License-Identifier: Apache-2.0
//! Tests what only a daemon can do: be absent, belong to several clients, and die. Ignored unless
//! asked for (--include-ignored): $KVM_SOCKET names a daemon, and $KVM_BIN_DIR/kvmd is the program
//! that a test starts which kills it.

mod common;

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use common::*;
use kvm::{Client, ConnectParams, Item, QueueParams, Status, Step};

/// A daemon of one test's own.
struct Daemon {
    folder: PathBuf,
    process: Child,
}

impl Daemon {
    fn start() -> Self {
        let folder = std::env::temp_dir().join(name("kvm"));
        std::fs::create_dir(&folder).unwrap();
        let process = Daemon::run(&folder);
        Daemon { folder, process }
    }

    fn run(folder: &std::path::Path) -> Child {
        let program = PathBuf::from(std::env::var_os("KVM_BIN_DIR").unwrap()).join("kvmd");
        Command::new(program)
            .arg("--socket")
            .arg(folder.join("kvmd.sock"))
            .args(["--host-capacity", "64MiB"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    }

    fn params(&self) -> ConnectParams {
        ConnectParams::new().socket_path(self.folder.join("kvmd.sock"))
    }

    fn connect(&self) -> Client {
        let start = Instant::now();
        loop {
            match Client::connect(&self.params()) {
                Ok(client) => return client,
                Err(error) => assert!(start.elapsed() < Duration::from_secs(30), "{error}"),
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

#[test]
#[ignore = "needs a daemon at $KVM_SOCKET"]
fn nobody_listens_where_there_is_no_daemon() {
    let params = ConnectParams::new().socket_path("/nonexistent/kvmd.sock");
    let error = Client::connect(&params).unwrap_err();
    assert_eq!(error.status(), Status::Disconnected, "{error}");
    let error = Client::connect(&ConnectParams::new().socket_path("a\0b")).unwrap_err();
    assert_eq!(error.status(), Status::Invalid);
    let error = Client::connect(&ConnectParams::new().client_name("a\0b")).unwrap_err();
    assert_eq!(error.status(), Status::Invalid);
    let params = ConnectParams::new().socket_path("x".repeat(200));
    let error = Client::connect(&params).unwrap_err();
    assert_eq!(error.status(), Status::Invalid, "{error}");
}

#[test]
#[ignore = "needs a daemon at $KVM_SOCKET"]
fn a_sequence_belongs_to_its_client() {
    let rig = Rig::new(2);
    let other = open();
    let space = other.find_space(&rig.space.info().unwrap().name).unwrap();
    assert_eq!(space.id(), rig.space.id());
    let not_ours = other.own_sequence(rig.sequence.id());
    assert_eq!(not_ours.info().unwrap_err().status(), Status::Permission);
    drop(not_ours); // Asks for what is not allowed, and is ignored.
    assert_eq!(rig.sequence.info().unwrap().n_tokens_max, 2);
    let mut queue = other.create_queue(&QueueParams::new()).unwrap();
    let (q, mut o) = (queries(1, 1), vec![0.0f32; Q_HEADS * DIM]);
    let step = Step::new(&space, 0).item(Item::new(&rig.sequence).query(1));
    let error = queue.attend(step.q(&q).o(&mut o)).unwrap_err();
    assert_eq!(error.status(), Status::Permission);
}

#[cfg(not(feature = "embedded"))]
#[test]
#[ignore = "needs a daemon at $KVM_SOCKET"]
fn the_thin_library_has_no_engine() {
    let error = Client::open_embedded(&kvm::EmbeddedParams::new()).unwrap_err();
    assert_eq!(error.status(), Status::Unsupported);
}

#[test]
#[ignore = "needs a daemon at $KVM_SOCKET"]
fn a_descriptor_says_when_completions_are_there() {
    extern "C" {
        fn poll(fds: *mut PollFd, n: u64, timeout_ms: i32) -> i32;
    }
    #[repr(C)]
    struct PollFd {
        fd: i32,
        events: i16,
        revents: i16,
    }
    use std::os::unix::io::AsRawFd;
    const POLLIN: i16 = 1;
    let mut queue = open().create_queue(&QueueParams::new()).unwrap();
    let fd = match queue.fd() {
        Some(fd) => fd.as_raw_fd(),
        None => return, // kvmd has no io_uring here.
    };
    queue.scope(|scope| {
        let ticket = scope.nop().unwrap();
        scope.submit();
        let (events, revents) = (POLLIN, 0);
        let mut one = PollFd {
            fd,
            events,
            revents,
        };
        // SAFETY: one structure of the C library's form.
        assert_eq!(unsafe { poll(&mut one, 1, 60_000) }, 1);
        let done = scope.next(Some(Duration::ZERO)).unwrap().unwrap();
        assert_eq!(done.ticket, ticket);
    });
}

#[test]
#[ignore = "needs a daemon at $KVM_SOCKET"]
fn calls_return_when_the_daemon_dies_and_work_again_with_the_next() {
    static N_LOST: AtomicU32 = AtomicU32::new(0);
    fn listen(level: kvm::LogLevel, message: &str) {
        if level == kvm::LogLevel::Error && message.contains("lost") {
            N_LOST.fetch_add(1, Ordering::Relaxed);
        }
        panic!("on purpose: a panic does not get into C");
    }
    let mut daemon = Daemon::start();
    let mut client = daemon.connect();
    let epoch = client.info().unwrap().epoch;
    let params = geometry();
    let space = client.register_space(&params).unwrap();
    let mut queue = client.create_queue(&QueueParams::new()).unwrap();
    let arena = client.create_arena(1 << 16).unwrap();
    let sequence = space.create_sequence().unwrap();
    let (k, mut o) = (kv(1, 1), arena.alloc::<f32>(Q_HEADS * DIM).unwrap());
    let q = queries(1, 2);
    let item = || Item::new(&sequence).append(1).query(1);
    let step = Step::new(&space, 0).item(item()).k(&k).v(&k).q(&q);
    queue.step(step.o(&mut o)).unwrap();

    kvm::set_log(Some(listen));
    daemon.kill();
    let n_failed = queue.scope(|scope| {
        let mut n_failed = 0;
        let step = Step::new(&space, 0)
            .item(item())
            .k(&k)
            .v(&k)
            .q(&q)
            .o(&mut o);
        match scope.step(step) {
            Ok(ticket) => {
                let error = scope.wait(ticket).unwrap().result.unwrap_err();
                assert_eq!(error.status(), Status::Disconnected);
                n_failed += 1;
            }
            Err(refused) => {
                assert_eq!(refused.error.status(), Status::Disconnected);
                n_failed += 1;
            }
        }
        n_failed
    });
    assert_eq!(n_failed, 1);
    assert_eq!(sequence.info().unwrap_err().status(), Status::Disconnected);
    assert!(arena.alloc::<f32>(1).is_err());
    o.fill(1.0); // The memory is still ours.
    kvm::set_log(None);
    assert_eq!(N_LOST.load(Ordering::Relaxed), 1);

    daemon.process = Daemon::run(&daemon.folder);
    drop(daemon.connect()); // It listens.
    assert_eq!(client.reconnect().unwrap_err().status(), Status::Busy);
    let old = sequence.id();
    drop((queue, o, arena, sequence, space));
    client.reconnect().unwrap();
    assert_ne!(client.info().unwrap().epoch, epoch);
    assert!(client.own_sequence(old).info().is_err());
    let space = client.register_space(&params).unwrap();
    let sequence = space.create_sequence().unwrap();
    let mut queue = client.create_queue(&QueueParams::new()).unwrap();
    let step = Step::new(&space, 0).item(Item::new(&sequence).append(1));
    queue.append(step.k(&k).v(&k)).unwrap();
}
