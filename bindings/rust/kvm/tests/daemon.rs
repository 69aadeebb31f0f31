// SPDX-License-Identifier: Apache-2.0
//! Tests what only a daemon can do: be absent, belong to several clients, and die. Ignored unless
//! asked for (--include-ignored): $KVM_SOCKET names a daemon, and $KVM_BIN_DIR/kvmd is the program
//! that a test starts which kills it.

mod common;

use std::ffi::CString;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use common::*;
use kvm::{Client, ConnectParams, Item, Priority, QueueParams, Status, Step};

/// A daemon of one test's own.
struct Daemon {
    folder: PathBuf,
    process: Child,
}

impl Daemon {
    fn start() -> Self {
        Daemon::start_in(std::env::temp_dir().join(name("kvm")))
    }

    /// With a folder `disk` for pages there.
    fn start_with_disk() -> Self {
        let folder = std::env::temp_dir().join(name("kvm"));
        std::fs::create_dir_all(folder.join("disk")).unwrap();
        Daemon::start_in(folder)
    }

    fn start_in(folder: PathBuf) -> Self {
        std::fs::create_dir_all(&folder).unwrap();
        let process = Daemon::run(&folder);
        Daemon { folder, process }
    }

    fn run(folder: &std::path::Path) -> Child {
        let program = PathBuf::from(std::env::var_os("KVM_BIN_DIR").unwrap()).join("kvmd");
        let mut command = Command::new(program);
        let disk = folder.join("disk");
        if disk.exists() {
            command.arg("--disk-directories").arg(disk);
            command.args(["--disk-capacity", "256MiB"]);
        }
        command
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

#[test]
#[ignore = "needs a daemon at $KVM_SOCKET"]
fn what_was_saved_is_there_after_the_daemon_was_killed() {
    fn ask(client: &Client, space: &kvm::Space, sequence: &kvm::Sequence) -> Vec<f32> {
        let mut queue = client.create_queue(&QueueParams::new()).unwrap();
        let (q, mut o) = (queries(1, 3), vec![0.0f32; Q_HEADS * DIM]);
        let step = Step::new(space, 0).item(Item::new(sequence).query(1));
        queue.attend(step.q(&q).o(&mut o)).unwrap();
        o
    }
    let c_string = |text: &str| CString::new(text).unwrap();
    let mut daemon = Daemon::start_with_disk();
    let params = geometry();
    let expected = {
        let client = daemon.connect();
        let space = client.register_space(&params).unwrap();
        let sequence = space.create_sequence().unwrap();
        let mut queue = client.create_queue(&QueueParams::new()).unwrap();
        let k = kv(100, 1);
        let step = Step::new(&space, 0).item(Item::new(&sequence).append(100));
        queue.append(step.k(&k).v(&k)).unwrap();
        assert!(client.snapshots().unwrap().is_empty());
        sequence.save("chat/1", false).unwrap();
        let error = sequence.save("chat/1", false).unwrap_err();
        assert_eq!(error.status(), Status::Exists);
        sequence.save("chat/1", true).unwrap();
        for wrong in ["", "a b", "a\0b"] {
            let error = sequence.save(wrong, false).unwrap_err();
            assert_eq!(error.status(), Status::Invalid, "{wrong:?}");
        }
        queue.scope(|scope| {
            let save = scope.save(&sequence, c_string("chat/2"), false).unwrap();
            scope.wait(save).unwrap().result.unwrap();
            let delete = scope.delete_snapshot(c_string("nothing")).unwrap();
            let error = scope.wait(delete).unwrap().result.unwrap_err();
            assert_eq!(error.status(), Status::NotFound);
        });
        ask(&client, &space, &sequence)
    };
    daemon.kill();
    daemon.process = Daemon::run(&daemon.folder);
    let client = daemon.connect();
    let space = client.register_space(&params).unwrap();
    let snapshots = client.snapshots().unwrap();
    let names: Vec<_> = snapshots.iter().map(|info| info.name.as_str()).collect();
    assert_eq!(names, ["chat/1", "chat/2"]);
    assert_eq!((snapshots[0].n_tokens, snapshots[0].is_lost), (100, false));
    assert_eq!(snapshots[0].space_name, space.info().unwrap().name);
    assert_eq!(snapshots, client.snapshots_of_all_users().unwrap());
    let sequence = space.load("chat/1").unwrap();
    assert_eq!(ask(&client, &space, &sequence), expected);
    sequence.prefetch().unwrap();
    for i in 0..16 {
        let part = Priority::new(51 + i).tokens(128 * u64::from(i)..128 * u64::from(i) + 64);
        sequence.set_priority(&part).unwrap();
    }
    let one_more = Priority::new(90).tokens(4096..=4096);
    let error = sequence.set_priority(&one_more).unwrap_err();
    assert_eq!(error.status(), Status::Limit, "{error}");
    for bad in [
        Priority::new(Priority::MAX + 1),
        Priority::new(1).tokens(7..7),
    ] {
        let error = sequence.set_priority(&bad).unwrap_err();
        assert_eq!(error.status(), Status::Invalid, "{error}");
    }
    let mut queue = client.create_queue(&QueueParams::new()).unwrap();
    let loaded = queue.scope(|scope| {
        let prefetch = scope.prefetch(&sequence).unwrap();
        scope.wait(prefetch).unwrap().result.unwrap();
        let whole = Priority::new(Priority::MAX).keep(Duration::from_secs(60));
        let set = scope.set_priority(&sequence, whole).unwrap();
        scope.wait(set).unwrap().result.unwrap();
        let load = scope.load(&space, c_string("chat/2")).unwrap();
        scope.wait(load).unwrap().sequence.unwrap()
    });
    let loaded = client.own_sequence(loaded);
    assert_eq!(ask(&client, &space, &loaded), expected);
    client.delete_snapshot("chat/1").unwrap();
    assert_eq!(client.snapshots().unwrap().len(), 1);
    let error = space.load("chat/1").unwrap_err();
    assert_eq!(error.status(), Status::NotFound);
    assert_eq!(ask(&client, &space, &sequence), expected);
}

#[test]
#[ignore = "needs a daemon at $KVM_SOCKET"]
fn dropped_tokens_come_back() {
    let rig = Rig::new(2);
    let sequence = rig.space.create_sequence().unwrap();
    let mut queue = rig.client.create_queue(&QueueParams::new()).unwrap();
    let k = kv(192, 1);
    for layer in 0..2 {
        let whole = Step::new(&rig.space, layer).item(Item::new(&sequence).append(192));
        queue.append(whole.k(&k).v(&k)).unwrap();
    }
    let ask = |queue: &mut kvm::Queue| {
        let (q, mut o) = (queries(1, 3), vec![0.0f32; Q_HEADS * DIM]);
        let step = Step::new(&rig.space, 0).item(Item::new(&sequence).query(1));
        queue.attend(step.q(&q).o(&mut o)).map(|_| o)
    };
    let expected = ask(&mut queue).unwrap();
    sequence.drop_tokens(..64).unwrap();
    assert_eq!(ask(&mut queue).unwrap_err().status(), Status::Partial);
    queue.scope(|scope| {
        let dropped = scope.drop_tokens(&sequence, 64..=127).unwrap();
        scope.wait(dropped).unwrap().result.unwrap();
    });
    assert_eq!(sequence.info().unwrap().n_entries_dropped, 2 * 128);
    let item = Item::new(&sequence)
        .append(192)
        .append_position(0)
        .restore();
    let step = Step::new(&rig.space, 0).item(item);
    queue.append(step.k(&k).v(&k)).unwrap();
    assert_eq!(ask(&mut queue).unwrap(), expected);
    let error = sequence.drop_tokens(..193).unwrap_err();
    assert_eq!(error.status(), Status::Invalid, "{error}");
}

#[test]
#[ignore = "needs a daemon at $KVM_SOCKET"]
fn without_a_disk_nothing_is_saved() {
    let rig = Rig::new(2);
    for error in [
        rig.sequence.save("one", true).unwrap_err(),
        rig.sequence.prefetch().unwrap_err(),
        rig.sequence.set_priority(&Priority::new(1)).unwrap_err(),
        rig.space.load("one").unwrap_err(),
        rig.client.delete_snapshot("one").unwrap_err(),
        rig.client.snapshots().unwrap_err(),
    ] {
        assert_eq!(error.status(), Status::Unsupported, "{error}");
    }
}
