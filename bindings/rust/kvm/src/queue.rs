// SPDX-License-Identifier: Apache-2.0
use std::fmt;
use std::os::raw::{c_int, c_void};
use std::os::unix::io::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Duration;

use kvm_sys as sys;

use crate::client::{nanoseconds, Client, Connection};
use crate::error::{check, Error, Result, Status};
use crate::scope::Scope;
use crate::sequence::{Sequence, SequenceId};
use crate::step::{Observe, Read, Step, StepStats};
use crate::tensor::Owner;

/// How a queue is made. Everything has a default.
///
/// ```
/// # use std::time::Duration;
/// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
/// let params = kvm::QueueParams::new().entries(16).spin(Duration::from_micros(200));
/// let queue = client.create_queue(&params)?;
/// # Ok::<(), kvm::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct QueueParams {
    n_entries: u32,
    spin_ns: u64,
    interrupt: Option<Arc<AtomicBool>>,
}

impl QueueParams {
    /// 256 requests in flight; a wait spins for 50 us before it sleeps.
    #[must_use]
    pub fn new() -> Self {
        QueueParams::default()
    }

    /// Requests in flight: at most 256, rounded up to a power of two.
    #[must_use]
    pub fn entries(mut self, n_entries: u32) -> Self {
        self.n_entries = n_entries;
        self
    }

    /// How long a wait spins before it sleeps; `Duration::MAX`: for ever.
    #[must_use]
    pub fn spin(mut self, time: Duration) -> Self {
        self.spin_ns = nanoseconds(time).max(1);
        self
    }

    /// A flag, which a signal handler may set: while it is set, [`Scope::next`] and [`Scope::wait`]
    /// fail with `Interrupted` instead of waiting for longer than some 10 ms. Requests go on, and
    /// the end of a scope waits for them as always.
    ///
    /// ```
    /// # use std::sync::{atomic::AtomicBool, Arc};
    /// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
    /// let flag = Arc::new(AtomicBool::new(false));
    /// let params = kvm::QueueParams::new().interrupted_by(Arc::clone(&flag));
    /// let queue = client.create_queue(&params)?;
    /// # Ok::<(), kvm::Error>(())
    /// ```
    #[must_use]
    pub fn interrupted_by(mut self, flag: Arc<AtomicBool>) -> Self {
        self.interrupt = Some(flag);
        self
    }
}

unsafe extern "C" fn is_set(user: *mut c_void) -> c_int {
    // SAFETY: `user` is the flag of a queue that is waited for, which holds it.
    let flag = unsafe { &*user.cast::<AtomicBool>() };
    c_int::from(flag.load(Ordering::Relaxed))
}

/// A pair of rings: requests to the service, completions back.
///
/// A queue belongs to one thread at a time: it may be sent to another, not shared. Calls wait;
/// [`Queue::scope`] has those that do not. Requests of one queue that touch the same sequence take
/// effect in the order of submission.
///
/// Dropping cancels what has not begun and waits for what runs.
///
/// ```
/// # use kvm::*;
/// # let client = Client::open_embedded(&EmbeddedParams::new().threads(1))?;
/// let mut queue = client.create_queue(&QueueParams::new())?;
/// std::thread::scope(|threads| {
///     threads.spawn(move || queue.scope(|scope| scope.nop().map(drop)));
/// });
/// # Ok::<(), Error>(())
/// ```
///
/// ```compile_fail,E0277
/// # use kvm::*;
/// # let client = Client::open_embedded(&EmbeddedParams::new().threads(1)).unwrap();
/// let queue = client.create_queue(&QueueParams::new()).unwrap();
/// std::thread::scope(|threads| {
///     threads.spawn(|| println!("{:?}", queue.fd())); // `Queue` is not `Sync`
/// });
/// ```
pub struct Queue {
    raw: NonNull<sys::kvm_queue>,
    connection: Arc<Connection>,
    /// The number of the last asynchronous request.
    last_ticket: u64,
    /// C has its address.
    _interrupt: Option<Arc<AtomicBool>>,
}

// SAFETY: kvm.h lets a queue go from thread to thread, one at a time. It is not Sync.
unsafe impl Send for Queue {}

impl Queue {
    pub(crate) fn create(client: &Client, params: &QueueParams) -> Result<Self> {
        let interrupt = params.interrupt.clone();
        let flag = interrupt.as_ref().map_or(ptr::null(), Arc::as_ptr);
        let params = sys::kvm_queue_params {
            n_entries: params.n_entries,
            spin_ns: params.spin_ns,
            is_interrupted: interrupt.is_some().then_some(is_set),
            interrupt_user: flag as *mut c_void,
            ..Default::default()
        };
        let connection = Arc::clone(client.connection());
        let mut out = ptr::null_mut();
        // SAFETY: a live client, parameters and an output that live through the call.
        check(unsafe { sys::kvm_queue_create(connection.raw(), &params, &mut out) })?;
        Ok(Queue {
            raw: NonNull::new(out).expect("kvm_queue_create gave no queue"),
            connection,
            last_ticket: 0,
            _interrupt: interrupt,
        })
    }

    pub(crate) fn raw(&self) -> *mut sys::kvm_queue {
        self.raw.as_ptr()
    }

    /// Frees a sequence that nobody knows of; what the service says is not looked at.
    pub(crate) fn free_unknown(&self, sequence: SequenceId) {
        drop(Sequence::own(Arc::clone(&self.connection), sequence));
    }

    pub(crate) fn next_ticket(&mut self) -> u64 {
        self.last_ticket += 1;
        self.last_ticket
    }

    /// Tensors name their arena by a number, which means one arena of one client: those of another
    /// client must not get as far as C.
    pub(crate) fn check_owners(&self, owners: &[Owner]) -> Result<()> {
        let mine: Owner = self.connection.raw();
        if owners.iter().all(|owner| owner.is_null() || *owner == mine) {
            return Ok(());
        }
        Err(Error::new(
            Status::Invalid,
            "a tensor lies in an arena of another client",
        ))
    }

    /// Appends, and waits. All or nothing. Fails with `Hole`, `Quota`, `NoSpace`, `NoMemory`,
    /// `Invalid`, `Stale`, `Lost`, `Permission`, `Deadline` or `Limit`.
    ///
    /// ```
    /// # use kvm::*;
    /// # let client = Client::open_embedded(&EmbeddedParams::new().threads(1))?;
    /// # let space = client.register_space(&SpaceParams::new("my-model", 2, 1, 8))?;
    /// # let mut queue = client.create_queue(&QueueParams::new())?;
    /// # let sequence = space.create_sequence()?;
    /// // A prefill of three tokens into both layers: [layer][row][head][dim].
    /// let (k, v) = ([0.1f32; 2 * 3 * 8], [0.2f32; 2 * 3 * 8]);
    /// let item = Item::new(&sequence).append(3).append_position(0);
    /// queue.append(Step::new(&space, 0).layers(2).item(item).k(&k).v(&v))?;
    /// assert_eq!(sequence.info()?.n_tokens_min, 3);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn append(&mut self, step: Step<'_>) -> Result<()> {
        self.check_owners(&step.owners())?;
        let params = step.to_raw()?;
        // SAFETY: this thread's queue; arrays and tensors are borrowed by `step` until the request,
        // which is over when the call returns, is done.
        check(unsafe { sys::kvm_append(self.raw(), &params) })
    }

    /// Attends, and waits. Outputs are written only on success. Fails with `Unsupported`,
    /// `Partial`,
    /// `Limit`, `NoMemory`, `Invalid`, `Stale`, `Lost`, `Permission` or `Deadline`.
    ///
    /// ```
    /// # use kvm::*;
    /// # let client = Client::open_embedded(&EmbeddedParams::new().threads(1))?;
    /// # let space = client.register_space(&SpaceParams::new("my-model", 1, 2, 8).kv_heads(1))?;
    /// # let mut queue = client.create_queue(&QueueParams::new())?;
    /// # let sequence = space.create_sequence()?;
    /// # let kv = [0.5f32; 3 * 8];
    /// # queue.append(Step::new(&space, 0).item(Item::new(&sequence).append(3)).k(&kv).v(&kv))?;
    /// let q = [0.0f32; 2 * 8];
    /// let (mut o, mut lse) = ([0.0f32; 2 * 8], [0.0f32; 2]);
    /// let item = Item::new(&sequence).query(1);
    /// queue.attend(Step::new(&space, 0).item(item).q(&q).o(&mut o).lse(&mut lse))?;
    /// assert!((lse[0] - 3f32.ln()).abs() < 1e-5); // three keys with a logit of 0
    /// # Ok::<(), Error>(())
    /// ```
    pub fn attend(&mut self, step: Step<'_>) -> Result<StepStats> {
        self.check_owners(&step.owners())?;
        let params = step.to_raw()?;
        let mut stats = sys::kvm_step_stats::default();
        // SAFETY: as in append.
        check(unsafe { sys::kvm_attend(self.raw(), &params, &mut stats) })?;
        Ok(StepStats::from_stats(&stats))
    }

    /// Appends and attends in one request, and waits: what a decode step does once a layer. Fails
    /// as the two above; everything is checked before anything is appended.
    ///
    /// Outputs cannot be looked at while the request has them:
    ///
    /// ```compile_fail,E0506
    /// # use kvm::*;
    /// # fn decode(queue: &mut Queue, space: &Space, item: Item) -> Result<()> {
    /// let (k, v, q, mut o) = ([0.0f32; 8], [0.0f32; 8], [0.0f32; 8], [0.0f32; 8]);
    /// let step = Step::new(space, 0).item(item).k(&k).v(&v).q(&q).o(&mut o);
    /// o[0] = 1.0; // borrowed by `step`
    /// queue.step(step)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn step(&mut self, step: Step<'_>) -> Result<StepStats> {
        self.check_owners(&step.owners())?;
        let params = step.to_raw()?;
        let mut stats = sys::kvm_step_stats::default();
        // SAFETY: as in append.
        check(unsafe { sys::kvm_step(self.raw(), &params, &mut stats) })?;
        Ok(StepStats::from_stats(&stats))
    }

    /// Hands over what a prefill saw, and waits. Fails with `Invalid`, `Quota`, `NoSpace`, `Stale`,
    /// `Lost` or `Permission`.
    pub fn observe(&mut self, observe: Observe<'_>) -> Result<()> {
        self.check_owners(&observe.owners())?;
        let params = observe.to_raw();
        // SAFETY: as in append.
        check(unsafe { sys::kvm_observe(self.raw(), &params) })
    }

    /// Copies K and V out, and waits. Fails with `Invalid` (beyond the layer's length), `Partial`,
    /// `Stale`, `Lost` or `Permission`.
    pub fn read(&mut self, read: Read<'_>) -> Result<()> {
        self.check_owners(&[read.k.owner, read.v.owner])?;
        // SAFETY: as in append.
        check(unsafe { sys::kvm_read(self.raw(), &read.to_raw()) })
    }

    /// Runs `body` with the asynchronous calls. What it starts has completed when this returns,
    /// also when it panics: so requests may borrow what lives outside of the call.
    ///
    /// ```
    /// # use kvm::*;
    /// # let client = Client::open_embedded(&EmbeddedParams::new().threads(1))?;
    /// # let space = client.register_space(&SpaceParams::new("my-model", 1, 1, 8))?;
    /// # let mut queue = client.create_queue(&QueueParams::new())?;
    /// # let (a, b) = (space.create_sequence()?, space.create_sequence()?);
    /// let (k, v, q) = ([0.1f32; 8], [0.2f32; 8], [0.3f32; 8]);
    /// let (mut o_a, mut o_b) = ([0.0f32; 8], [0.0f32; 8]);
    /// let decode = |sequence| {
    ///     Step::new(&space, 0).item(Item::new(sequence).append(1).query(1)).k(&k).v(&v).q(&q)
    /// };
    /// queue.scope(|scope| -> Result<()> {
    ///     let first = scope.step(decode(&a).o(&mut o_a))?;
    ///     let second = scope.step(decode(&b).o(&mut o_b))?;
    ///     scope.submit();
    ///     // ... work of the engine's own ...
    ///     scope.wait(first)?.result?;
    ///     scope.wait(second)?.result?;
    ///     Ok(())
    /// })?;
    /// assert!((o_b[0] - 0.2).abs() < 1e-3);
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// What a request writes stays out of reach until it is done:
    ///
    /// ```compile_fail,E0502
    /// # use kvm::*;
    /// # fn two(queue: &mut Queue, space: &Space, item: Item) {
    /// let (q, mut o) = ([0.0f32; 8], [0.0f32; 8]);
    /// queue.scope(|scope| {
    ///     scope.attend(Step::new(space, 0).item(item).q(&q).o(&mut o)).unwrap();
    ///     println!("{}", o[0]); // in flight
    /// });
    /// # }
    /// ```
    ///
    /// and a request borrows nothing that would go before it:
    ///
    /// ```compile_fail,E0597
    /// # use kvm::*;
    /// # fn one(queue: &mut Queue, space: &Space, item: Item) {
    /// queue.scope(|scope| {
    ///     let (q, mut o) = ([0.0f32; 8], [0.0f32; 8]);
    ///     scope.attend(Step::new(space, 0).item(item).q(&q).o(&mut o)).unwrap();
    /// });
    /// # }
    /// ```
    pub fn scope<'env, F, R>(&mut self, body: F) -> R
    where
        F: for<'s, 'a> FnOnce(&'a mut Scope<'s, 'env>) -> R,
    {
        let mut scope = Scope::new(self);
        body(&mut scope)
    }

    /// A descriptor that polls readable when completions are there, for event loops; not to be
    /// read. `None` where the service does not offer it.
    ///
    /// ```
    /// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
    /// # let queue = client.create_queue(&kvm::QueueParams::new())?;
    /// assert_eq!(queue.fd().is_some(), client.info()?.has_eventfd);
    /// # Ok::<(), kvm::Error>(())
    /// ```
    #[must_use]
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        // SAFETY: this thread's queue.
        let fd = unsafe { sys::kvm_queue_fd(self.raw()) };
        // SAFETY: open as long as the queue, which is borrowed.
        (fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(fd) })
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // SAFETY: the thread that owns it, and nothing is outstanding: a scope waits for its own.
        unsafe { sys::kvm_queue_destroy(self.raw()) }
    }
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue").finish_non_exhaustive()
    }
}
