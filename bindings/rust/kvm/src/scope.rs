// SPDX-License-Identifier: Apache-2.0
use std::collections::{HashMap, VecDeque};
use std::ffi::CString;
use std::fmt;
use std::marker::PhantomData;
use std::ops::RangeBounds;
use std::os::unix::io::BorrowedFd;
use std::time::Duration;

use kvm_sys as sys;

use crate::client::nanoseconds;
use crate::error::{check, Error, Result, Status};
use crate::prefix::{PrefixHash, Publication};
use crate::queue::Queue;
use crate::sequence::{positions_of, Priority, SequenceId, SequenceParams};
use crate::space::{Space, SpaceId};
use crate::step::{Observe, Read, Step, StepStats};

/// A request that a [`Scope`] starts, and a [`Completion`] gives back with all that it borrowed.
///
/// ```
/// # use kvm::*;
/// # fn o_of<'b>(completion: Completion<'b>) -> Result<&'b mut [f32]> {
/// match completion.request {
///     Request::Attend(step) | Request::Step(step) => step.into_outputs().0.into_slice(),
///     _ => Ok(&mut []),
/// }
/// # }
/// ```
#[derive(Debug)]
pub enum Request<'b> {
    /// [`Queue::append`].
    Append(Step<'b>),
    /// [`Queue::attend`].
    Attend(Step<'b>),
    /// [`Queue::step`].
    Step(Step<'b>),
    /// [`Queue::read`].
    Read(Read<'b>),
    /// [`Queue::observe`].
    Observe(Observe<'b>),
    /// [`Space::create_sequence_with`](crate::Space::create_sequence_with).
    Create(SpaceId, SequenceParams),
    /// [`Sequence::fork`](crate::Sequence::fork).
    Fork(SequenceId, u64),
    /// [`Sequence::free`](crate::Sequence::free).
    Free(SequenceId),
    /// [`Sequence::truncate`](crate::Sequence::truncate).
    Truncate(SequenceId, u64),
    /// [`Sequence::commit`](crate::Sequence::commit).
    Commit(SequenceId, u64),
    /// [`Sequence::publish`](crate::Sequence::publish).
    Publish(SequenceId),
    /// [`Space::take_sequence`](crate::Space::take_sequence).
    Take(SequenceId),
    /// [`Sequence::prefetch`](crate::Sequence::prefetch).
    Prefetch(SequenceId),
    /// [`Sequence::save`](crate::Sequence::save): the name, and whether it may replace.
    Save(SequenceId, CString, bool),
    /// [`Space::load`](crate::Space::load).
    Load(SpaceId, CString),
    /// [`Client::delete_snapshot`](crate::Client::delete_snapshot).
    DeleteSnapshot(CString),
    /// [`Sequence::publish_prefix`](crate::Sequence::publish_prefix): the hashes, and how long to
    /// keep it.
    PublishPrefix(SequenceId, Vec<PrefixHash>, Option<Duration>),
    /// [`Sequence::set_priority`](crate::Sequence::set_priority).
    SetPriority(SequenceId, Priority),
    /// [`Sequence::drop_tokens`](crate::Sequence::drop_tokens): the first token, and the one
    /// behind the last.
    DropTokens(SequenceId, u64, u64),
    /// Does nothing and completes.
    Nop,
}

/// The number of a request of a [`Scope`].
///
/// ```
/// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
/// # let mut queue = client.create_queue(&kvm::QueueParams::new())?;
/// queue.scope(|scope| -> kvm::Result<()> {
///     let ticket: kvm::Ticket = scope.nop()?;
///     assert_eq!(scope.wait(ticket)?.ticket, ticket);
///     Ok(())
/// })?;
/// # Ok::<(), kvm::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket(u64);

/// A request that is done.
///
/// ```
/// # use kvm::*;
/// # fn report(completion: Completion<'_>) {
/// match completion.result {
///     Ok(stats) => println!("{} keys read", stats.keys_read),
///     Err(error) => eprintln!("{error}"),
/// }
/// # }
/// ```
#[derive(Debug)]
pub struct Completion<'b> {
    /// The request that has ended.
    pub ticket: Ticket,
    /// Counts what it did, or says why it failed.
    pub result: Result<StepStats>,
    /// The sequence that `Create` or `Fork` has made, for
    /// [`Client::own_sequence`](crate::Client::own_sequence). One whose completion is never taken
    /// is freed with the scope.
    pub sequence: Option<SequenceId>,
    /// The request itself, with its tensors.
    pub request: Request<'b>,
}

/// A request that was not started, and why: `Again` (the queue is full: take completions first),
/// or what can be seen without the service. Turns into the [`Error`] with `?`.
///
/// ```
/// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
/// # let mut queue = client.create_queue(&kvm::QueueParams::new().entries(1))?;
/// queue.scope(|scope| -> kvm::Result<()> {
///     scope.nop()?;
///     let refused = scope.nop().unwrap_err();
///     assert_eq!(refused.error.status(), kvm::Status::Again);
///     scope.next(None)?;
///     scope.start(*refused.request)?;
///     Ok(())
/// })?;
/// # Ok::<(), kvm::Error>(())
/// ```
#[derive(Debug)]
pub struct Refused<'b> {
    /// Why.
    pub error: Error,
    /// The request, to be tried again.
    pub request: Box<Request<'b>>,
}

impl fmt::Display for Refused<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for Refused<'_> {}

impl From<Refused<'_>> for Error {
    fn from(refused: Refused<'_>) -> Self {
        refused.error
    }
}

type Started<'b> = std::result::Result<Ticket, Refused<'b>>;

/// The asynchronous calls of a queue, inside [`Queue::scope`].
///
/// Requests are staged by the functions named after them and made visible to the service all at
/// once by [`Scope::submit`], or by the next call that takes completions.
///
/// ```
/// # use kvm::*;
/// # let client = Client::open_embedded(&EmbeddedParams::new().threads(1))?;
/// # let space = client.register_space(&SpaceParams::new("my-model", 1, 1, 8))?;
/// # let mut queue = client.create_queue(&QueueParams::new())?;
/// # let sequence = space.create_sequence()?;
/// let (kv, mut k) = ([0.5f32; 4 * 8], [0.0f32; 8]);
/// queue.scope(|scope| -> Result<()> {
///     let item = Item::new(&sequence).append(4);
///     scope.append(Step::new(&space, 0).item(item).k(&kv).v(&kv))?;
///     scope.truncate(&sequence, 1)?; // in this order, for it is the same sequence
///     scope.read(Read::new(&sequence, 0, 0..1).k(&mut k))?;
///     while let Some(completion) = scope.next(None)? {
///         completion.result?;
///     }
///     Ok(())
/// })?;
/// assert_eq!(k, [0.5; 8]);
/// # Ok::<(), Error>(())
/// ```
pub struct Scope<'s, 'env> {
    queue: &'s mut Queue,
    /// The requests that the service may be working on, by ticket.
    in_flight: HashMap<u64, Request<'env>>,
    /// Completions taken while waiting for another.
    done: VecDeque<Completion<'env>>,
    /// Invariant in 'env: a request must borrow for all of it, not for less.
    _env: PhantomData<&'env mut &'env ()>,
}

// INVARIANT: the request of every number that C has not completed is in `in_flight`, with its
// borrows; a Scope is dropped in Queue::scope alone, before 'env ends. No user can have one by
// value: it is lent as `&mut Scope<'s, 'env>` with an 's of its own, so two of them cannot be
// swapped.

impl<'s, 'env> Scope<'s, 'env> {
    pub(crate) fn new(queue: &'s mut Queue) -> Self {
        Scope {
            queue,
            in_flight: HashMap::new(),
            done: VecDeque::new(),
            _env: PhantomData,
        }
    }

    /// Stages a request. The functions named after the requests do the same.
    ///
    /// ```
    /// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
    /// # let mut queue = client.create_queue(&kvm::QueueParams::new())?;
    /// queue.scope(|scope| scope.start(kvm::Request::Nop).map(drop))?;
    /// # Ok::<(), kvm::Error>(())
    /// ```
    pub fn start(&mut self, request: Request<'env>) -> Started<'env> {
        let ticket = self.queue.next_ticket();
        // In the table before C knows it, so that nothing can come between.
        self.in_flight.insert(ticket, request);
        match self.stage(ticket) {
            Ok(()) => Ok(Ticket(ticket)),
            Err(error) => {
                let request = self.in_flight.remove(&ticket).unwrap_or(Request::Nop);
                Err(Refused {
                    error,
                    request: Box::new(request),
                })
            }
        }
    }

    fn stage(&self, ticket: u64) -> Result<()> {
        type StageStep = unsafe extern "C" fn(
            *mut sys::kvm_queue,
            *const sys::kvm_step_params,
            u64,
        ) -> sys::kvm_status;
        let queue = self.queue.raw();
        let stage_step = |step: &Step<'env>, function: StageStep| -> Result<()> {
            self.queue.check_owners(&step.owners())?;
            let params = step.to_raw()?;
            // SAFETY: this thread's queue. C copies arrays now; tensors are borrowed for 'env, and
            // the scope waits for the completion before that ends.
            check(unsafe { function(queue, &params, ticket) })
        };
        match &self.in_flight[&ticket] {
            Request::Append(step) => stage_step(step, sys::kvm_append_async),
            Request::Attend(step) => stage_step(step, sys::kvm_attend_async),
            Request::Step(step) => stage_step(step, sys::kvm_step_async),
            Request::Read(read) => {
                self.queue.check_owners(&[read.k.owner, read.v.owner])?;
                // SAFETY: as above.
                check(unsafe { sys::kvm_read_async(queue, &read.to_raw(), ticket) })
            }
            Request::Observe(observe) => {
                self.queue.check_owners(&observe.owners())?;
                // SAFETY: as above.
                check(unsafe { sys::kvm_observe_async(queue, &observe.to_raw(), ticket) })
            }
            Request::Create(space, params) => {
                // SAFETY: this thread's queue; C reads the parameters now.
                check(unsafe {
                    sys::kvm_seq_create_async(queue, space.0, &params.to_raw(), ticket)
                })
            }
            Request::Fork(sequence, n_tokens) => {
                // SAFETY: this thread's queue.
                check(unsafe { sys::kvm_seq_fork_async(queue, sequence.0, *n_tokens, ticket) })
            }
            Request::Free(sequence) => {
                // SAFETY: this thread's queue.
                check(unsafe { sys::kvm_seq_free_async(queue, sequence.0, ticket) })
            }
            Request::Truncate(sequence, n_tokens) => {
                // SAFETY: this thread's queue.
                check(unsafe { sys::kvm_seq_truncate_async(queue, sequence.0, *n_tokens, ticket) })
            }
            Request::Commit(sequence, n_tokens) => {
                // SAFETY: this thread's queue.
                check(unsafe { sys::kvm_seq_commit_async(queue, sequence.0, *n_tokens, ticket) })
            }
            Request::Publish(sequence) => {
                // SAFETY: this thread's queue.
                check(unsafe { sys::kvm_seq_publish_async(queue, sequence.0, ticket) })
            }
            Request::Take(sequence) => {
                // SAFETY: this thread's queue.
                check(unsafe { sys::kvm_seq_take_async(queue, sequence.0, ticket) })
            }
            Request::Prefetch(sequence) => {
                // SAFETY: this thread's queue.
                check(unsafe { sys::kvm_seq_prefetch_async(queue, sequence.0, ticket) })
            }
            Request::Save(sequence, name, replace) => {
                let flags = if *replace { sys::KVM_SAVE_REPLACE } else { 0 };
                // SAFETY: this thread's queue; C copies the name now.
                check(unsafe {
                    sys::kvm_seq_save_async(queue, sequence.0, name.as_ptr(), flags, ticket)
                })
            }
            Request::Load(space, name) => {
                // SAFETY: as above.
                check(unsafe { sys::kvm_seq_load_async(queue, space.0, name.as_ptr(), ticket) })
            }
            Request::DeleteSnapshot(name) => {
                // SAFETY: as above.
                check(unsafe { sys::kvm_snapshot_delete_async(queue, name.as_ptr(), ticket) })
            }
            Request::PublishPrefix(sequence, hashes, keep) => {
                let what = Publication::new(hashes, *keep)?;
                // SAFETY: this thread's queue; as many hashes as are counted, which C copies now.
                check(unsafe {
                    sys::kvm_prefix_publish_async(
                        queue,
                        sequence.0,
                        what.hashes,
                        what.n_hashes,
                        what.keep_ns,
                        ticket,
                    )
                })
            }
            Request::SetPriority(sequence, priority) => {
                // SAFETY: this thread's queue; C copies the structure now.
                check(unsafe {
                    sys::kvm_seq_set_priority_async(queue, &priority.of(*sequence), ticket)
                })
            }
            Request::DropTokens(sequence, begin, end) => {
                // SAFETY: this thread's queue.
                check(unsafe { sys::kvm_seq_drop_async(queue, sequence.0, *begin, *end, ticket) })
            }
            // SAFETY: this thread's queue.
            Request::Nop => check(unsafe { sys::kvm_nop_async(queue, ticket) }),
        }
    }

    /// As [`Queue::append`].
    pub fn append(&mut self, step: Step<'env>) -> Started<'env> {
        self.start(Request::Append(step))
    }

    /// As [`Queue::attend`].
    pub fn attend(&mut self, step: Step<'env>) -> Started<'env> {
        self.start(Request::Attend(step))
    }

    /// As [`Queue::step`].
    pub fn step(&mut self, step: Step<'env>) -> Started<'env> {
        self.start(Request::Step(step))
    }

    /// As [`Queue::read`].
    pub fn read(&mut self, read: Read<'env>) -> Started<'env> {
        self.start(Request::Read(read))
    }

    /// As [`Queue::observe`].
    pub fn observe(&mut self, observe: Observe<'env>) -> Started<'env> {
        self.start(Request::Observe(observe))
    }

    /// As [`Space::create_sequence_with`](crate::Space::create_sequence_with). The completion has
    /// the sequence.
    ///
    /// ```
    /// # use kvm::*;
    /// # let client = Client::open_embedded(&EmbeddedParams::new().threads(1))?;
    /// # let space = client.register_space(&SpaceParams::new("my-model", 1, 1, 8))?;
    /// # let mut queue = client.create_queue(&QueueParams::new())?;
    /// let made = queue.scope(|scope| -> Result<SequenceId> {
    ///     let ticket = scope.create(&space, SequenceParams::new())?;
    ///     let done = scope.wait(ticket)?;
    ///     done.result?;
    ///     Ok(done.sequence.expect("a create that succeeds has made one"))
    /// })?;
    /// let sequence = client.own_sequence(made); // freed when dropped
    /// assert_eq!(sequence.info()?.n_tokens_max, 0);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn create(&mut self, space: &Space, params: SequenceParams) -> Started<'env> {
        self.start(Request::Create(space.id(), params))
    }

    /// As [`Sequence::fork`](crate::Sequence::fork). The completion has the sequence.
    pub fn fork(&mut self, parent: impl Into<SequenceId>, n_tokens: u64) -> Started<'env> {
        self.start(Request::Fork(parent.into(), n_tokens))
    }

    /// As [`Sequence::free`](crate::Sequence::free), of a sequence that no
    /// [`Sequence`](crate::Sequence) owns.
    pub fn free(&mut self, sequence: SequenceId) -> Started<'env> {
        self.start(Request::Free(sequence))
    }

    /// As [`Sequence::publish`](crate::Sequence::publish), of a sequence that no
    /// [`Sequence`](crate::Sequence) owns.
    pub fn publish(&mut self, sequence: SequenceId) -> Started<'env> {
        self.start(Request::Publish(sequence))
    }

    /// As [`Sequence::publish_prefix`](crate::Sequence::publish_prefix), of a sequence that no
    /// [`Sequence`](crate::Sequence) owns. It is still there where this fails, to be owned by
    /// [`Client::own_sequence`](crate::Client::own_sequence).
    pub fn publish_prefix(
        &mut self,
        sequence: SequenceId,
        hashes: &[PrefixHash],
        keep: Option<Duration>,
    ) -> Started<'env> {
        self.start(Request::PublishPrefix(sequence, hashes.to_vec(), keep))
    }

    /// As [`Space::take_sequence`](crate::Space::take_sequence); to be owned by
    /// [`Client::own_sequence`](crate::Client::own_sequence) once it has completed.
    pub fn take_sequence(&mut self, sequence: SequenceId) -> Started<'env> {
        self.start(Request::Take(sequence))
    }

    /// As [`Sequence::prefetch`](crate::Sequence::prefetch).
    pub fn prefetch(&mut self, sequence: impl Into<SequenceId>) -> Started<'env> {
        self.start(Request::Prefetch(sequence.into()))
    }

    /// As [`Sequence::set_priority`](crate::Sequence::set_priority).
    pub fn set_priority(
        &mut self,
        sequence: impl Into<SequenceId>,
        priority: Priority,
    ) -> Started<'env> {
        self.start(Request::SetPriority(sequence.into(), priority))
    }

    /// As [`Sequence::drop_tokens`](crate::Sequence::drop_tokens).
    pub fn drop_tokens(
        &mut self,
        sequence: impl Into<SequenceId>,
        tokens: impl RangeBounds<u64>,
    ) -> Started<'env> {
        let (begin, end) = positions_of(&tokens);
        self.start(Request::DropTokens(sequence.into(), begin, end))
    }

    /// As [`Sequence::save`](crate::Sequence::save), of a name without a NUL byte.
    pub fn save(
        &mut self,
        sequence: impl Into<SequenceId>,
        name: CString,
        replace: bool,
    ) -> Started<'env> {
        self.start(Request::Save(sequence.into(), name, replace))
    }

    /// As [`Space::load`](crate::Space::load). The completion has the new sequence, to be owned by
    /// [`Client::own_sequence`](crate::Client::own_sequence).
    pub fn load(&mut self, space: &Space, name: CString) -> Started<'env> {
        self.start(Request::Load(space.id(), name))
    }

    /// As [`Client::delete_snapshot`](crate::Client::delete_snapshot).
    pub fn delete_snapshot(&mut self, name: CString) -> Started<'env> {
        self.start(Request::DeleteSnapshot(name))
    }

    /// As [`Sequence::truncate`](crate::Sequence::truncate).
    pub fn truncate(&mut self, sequence: impl Into<SequenceId>, n_tokens: u64) -> Started<'env> {
        self.start(Request::Truncate(sequence.into(), n_tokens))
    }

    /// As [`Sequence::commit`](crate::Sequence::commit).
    pub fn commit(&mut self, sequence: impl Into<SequenceId>, n_tokens: u64) -> Started<'env> {
        self.start(Request::Commit(sequence.into(), n_tokens))
    }

    /// A request that does nothing.
    pub fn nop(&mut self) -> Started<'env> {
        self.start(Request::Nop)
    }

    /// Makes what is staged visible to the service. Where that cannot be done, the requests
    /// complete with the reason.
    pub fn submit(&mut self) {
        // SAFETY: this thread's queue.
        let _ = unsafe { sys::kvm_submit(self.queue.raw()) };
    }

    /// Waits for a request. Fails with `NotFound` when its completion was taken before.
    pub fn wait(&mut self, ticket: Ticket) -> Result<Completion<'env>> {
        loop {
            if let Some(at) = self.done.iter().position(|done| done.ticket == ticket) {
                return Ok(self.done.remove(at).expect("its position was just found"));
            }
            if !self.in_flight.contains_key(&ticket.0) {
                return Err(Error::new(
                    Status::NotFound,
                    "the completion of this request was taken before",
                ));
            }
            self.take(u64::MAX)?;
        }
    }

    /// The next completion, whichever it is; waits as long as `timeout` says (`None`: no limit).
    /// `Ok(None)`: nothing is outstanding, or the time has passed.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
    /// # let mut queue = client.create_queue(&kvm::QueueParams::new())?;
    /// queue.scope(|scope| -> kvm::Result<()> {
    ///     assert!(scope.next(None)?.is_none());
    ///     scope.nop()?;
    ///     while scope.next(Some(Duration::ZERO))?.is_none() {
    ///         std::thread::yield_now(); // or work of the engine's own
    ///     }
    ///     Ok(())
    /// })?;
    /// # Ok::<(), kvm::Error>(())
    /// ```
    pub fn next(&mut self, timeout: Option<Duration>) -> Result<Option<Completion<'env>>> {
        if self.done.is_empty() && !self.in_flight.is_empty() {
            self.take(timeout.map_or(u64::MAX, nanoseconds))?;
        }
        Ok(self.done.pop_front())
    }

    /// Requests whose completions have not been taken.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.in_flight.len() + self.done.len()
    }

    /// Asks that a request not be started. It completes in any case, with `Cancelled` or its own
    /// result. Fails with `NotFound` (not outstanding) or `Again` (try again).
    ///
    /// ```
    /// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
    /// # let mut queue = client.create_queue(&kvm::QueueParams::new())?;
    /// queue.scope(|scope| -> kvm::Result<()> {
    ///     let ticket = scope.nop()?;
    ///     scope.cancel(ticket)?;
    ///     let error = scope.wait(ticket)?.result.unwrap_err();
    ///     assert_eq!(error.status(), kvm::Status::Cancelled);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), kvm::Error>(())
    /// ```
    pub fn cancel(&mut self, ticket: Ticket) -> Result<()> {
        // SAFETY: this thread's queue.
        check(unsafe { sys::kvm_cancel(self.queue.raw(), ticket.0) })
    }

    /// As [`Queue::fd`].
    #[must_use]
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.queue.fd()
    }

    /// Submits, and moves one completion from C to `done`, if there is one in time. One at a time,
    /// for each failure has a sentence of its own.
    ///
    /// ENSURES: without a limit of time, `in_flight` has become smaller, or it fails.
    fn take(&mut self, timeout_ns: u64) -> Result<()> {
        self.submit();
        let mut raw = sys::kvm_completion::default();
        // SAFETY: this thread's queue, and room for one completion.
        let n = unsafe { sys::kvm_wait(self.queue.raw(), &mut raw, 1, 1, timeout_ns) };
        if n < 0 {
            return Err(Error::last(n));
        }
        if n == 0 {
            if timeout_ns == u64::MAX {
                self.give_up();
            }
            return Ok(());
        }
        let result = match raw.status {
            sys::KVM_OK => Ok(StepStats::from_completion(&raw)),
            code => Err(Error::last(code)),
        };
        if let Some(request) = self.in_flight.remove(&raw.user_data) {
            self.done.push_back(Completion {
                ticket: Ticket(raw.user_data),
                result,
                sequence: (raw.seq != 0).then_some(SequenceId(raw.seq)),
                request,
            });
        }
        Ok(())
    }

    /// The library says that nothing is outstanding: what is still here will never complete.
    fn give_up(&mut self) {
        for (ticket, request) in self.in_flight.drain() {
            self.done.push_back(Completion {
                ticket: Ticket(ticket),
                result: Err(Error::new(Status::Internal, "the request was not answered")),
                sequence: None,
                request,
            });
        }
    }
}

impl Drop for Scope<'_, '_> {
    fn drop(&mut self) {
        self.finish();
        for sequence in self.done.iter().filter_map(|done| done.sequence) {
            self.queue.free_unknown(sequence);
        }
    }
}

impl Scope<'_, '_> {
    /// Waits for what is in flight.
    fn finish(&mut self) {
        while !self.in_flight.is_empty() {
            let error = match self.take(u64::MAX) {
                Ok(()) => continue,
                Err(error) => error,
            };
            match error.status() {
                // Said when all has been answered, and of a copy of the process that others own.
                Status::Disconnected | Status::Protocol | Status::Forked => return,
                Status::NoMemory => std::thread::yield_now(),
                Status::Interrupted => {}
                // Going on would end borrows that the service may still use.
                _ => {
                    eprintln!("kvm: cannot wait for requests in flight: {error}");
                    std::process::abort();
                }
            }
        }
    }
}

impl fmt::Debug for Scope<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scope")
            .field("outstanding", &self.outstanding())
            .finish_non_exhaustive()
    }
}
