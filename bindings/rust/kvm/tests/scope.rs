// SPDX-License-Identifier: Apache-2.0
//! Requests in flight: what they borrow comes back when they are done, and not before.

mod common;

use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::*;
use kvm::{
    Item, Observe, QueueParams, Read, Request, Result, Sequence, SequenceParams, Sink, Space,
    Status, Step,
};

const CLOSE: f64 = 1e-5;

#[test]
fn completions_come_in_any_order_that_is_asked_for() {
    let mut rig = Rig::new(6);
    let q = queries(4, 1);
    let mut outputs = vec![[0.0f32; Q_HEADS * DIM]; 4];
    let row = |i: usize| i * Q_HEADS * DIM..(i + 1) * Q_HEADS * DIM;
    rig.queue.scope(|scope| {
        let mut tickets = Vec::new();
        for (i, o) in outputs.iter_mut().enumerate() {
            let item = Item::new(&rig.sequence).query(1).query_position(i as u64);
            let step = Step::new(&rig.space, 0).item(item);
            tickets.push(scope.attend(step.q(&q[row(i)]).o(o)).unwrap());
        }
        scope.submit();
        assert_eq!(scope.outstanding(), 4);
        for ticket in tickets.iter().rev() {
            let completion = scope.wait(*ticket).unwrap();
            assert_eq!(completion.ticket, *ticket);
            let stats = completion.result.unwrap();
            assert_eq!(stats.keys_present, stats.keys_read);
        }
        let again = scope.wait(tickets[0]).unwrap_err();
        assert_eq!(again.status(), Status::NotFound);
        assert_eq!(scope.outstanding(), 0);
    });
    for (i, o) in outputs.iter().enumerate() {
        let (expected, _) = oracle(&q[row(i)], &rig.k, &rig.v, |t| t <= i);
        assert_close(o, &expected, CLOSE);
    }
}

fn ask<'b>(space: &Space, sequence: &Sequence, q: &'b [f32], o: Sink<'b>) -> Step<'b> {
    let item = Item::new(sequence).query(1);
    Step::new(space, 0).item(item).q(q).o(o)
}

/// Double buffering: while one result is looked at, the next request runs.
#[test]
fn a_completion_gives_the_memory_back() {
    let mut rig = Rig::new(6);
    let arena = rig.client.create_arena(1 << 16).unwrap();
    let q = queries(1, 2);
    let mut in_arena = arena.alloc::<f32>(Q_HEADS * DIM).unwrap();
    let mut on_heap = vec![0.0f32; Q_HEADS * DIM];
    let (space, sequence) = (&rig.space, &rig.sequence);
    let (expected, _) = oracle(&q, &rig.k, &rig.v, |_| true);
    let ask = |o| ask(space, sequence, &q, o);
    let n_looked_at = rig.queue.scope(|scope| {
        scope.attend(ask((&mut in_arena).into())).unwrap();
        scope.attend(ask((&mut on_heap).into())).unwrap();
        let mut n = 0;
        while n < 10 {
            let completion = scope.next(None).unwrap().unwrap();
            completion.result.unwrap();
            let step = match completion.request {
                Request::Attend(step) => step,
                other => panic!("{other:?} came back"),
            };
            let (o, _, _) = step.into_outputs();
            let o = o.into_slice::<f32>().unwrap();
            assert_close(o, &expected, CLOSE);
            o.fill(0.0);
            n += 1;
            // As memory of this process from now on: the arena is the buffer's knowledge.
            scope.attend(ask(o.into())).unwrap();
        }
        n
    });
    assert_eq!(n_looked_at, 10);
    assert_close(&on_heap, &expected, CLOSE); // The scope waited for the last ones.
}

#[test]
fn a_scope_waits_for_what_nobody_waited_for() {
    let mut rig = Rig::new(3);
    let q = queries(1, 3);
    let (mut o, mut k) = (vec![0.0f32; Q_HEADS * DIM], vec![0.0f32; KV_HEADS * DIM]);
    rig.queue.scope(|scope| {
        let item = Item::new(&rig.sequence).query(1);
        let step = Step::new(&rig.space, 0).item(item).q(&q).o(&mut o);
        scope.attend(step).unwrap(); // Neither submitted nor waited for.
        let read = Read::new(&rig.sequence, 1, 2..3).k(&mut k);
        scope.read(read).unwrap();
    });
    assert_close(&o, &oracle(&q, &rig.k, &rig.v, |_| true).0, CLOSE);
    assert_eq!(k, rig.k[2 * KV_HEADS * DIM..]);
    rig.ask(Item::new(&rig.sequence).query(1), &q).unwrap(); // The queue is free again.
}

#[test]
fn a_scope_waits_when_its_body_panics() {
    let mut rig = Rig::new(3);
    let q = queries(1, 4);
    let mut o = vec![0.0f32; Q_HEADS * DIM];
    let queue = &mut rig.queue;
    let item = Item::new(&rig.sequence).query(1);
    let step = Step::new(&rig.space, 0).item(item).q(&q).o(&mut o);
    let body = AssertUnwindSafe(|| {
        queue.scope(|scope| {
            scope.attend(step).unwrap();
            std::panic::panic_any("on purpose");
        })
    });
    assert!(catch_unwind(body).is_err());
    assert_close(&o, &oracle(&q, &rig.k, &rig.v, |_| true).0, CLOSE);
    rig.ask(Item::new(&rig.sequence).query(1), &q).unwrap();
}

#[test]
fn a_full_queue_gives_the_request_back() {
    let mut rig = Rig::new(2);
    let params = QueueParams::new().entries(2);
    let mut queue = rig.client.create_queue(&params).unwrap();
    let k = kv(1, 5);
    let sequence = &rig.sequence;
    let append = |layer| {
        let item = Item::new(sequence).append(1);
        Step::new(&rig.space, layer).item(item).k(&k).v(&k)
    };
    queue.scope(|scope| {
        scope.append(append(0)).unwrap();
        scope.append(append(1)).unwrap();
        let refused = scope.append(append(0)).unwrap_err();
        assert_eq!(refused.error.status(), Status::Again);
        assert_eq!(scope.outstanding(), 2);
        scope.next(None).unwrap().unwrap().result.unwrap();
        scope.start(*refused.request).unwrap();
    });
    let info = rig.sequence.info().unwrap();
    assert_eq!((info.n_tokens_min, info.n_tokens_max), (3, 4));
    rig.queue.scope(|scope| scope.nop().map(drop)).unwrap();
}

#[test]
fn every_failure_has_its_own_sentence() {
    let mut rig = Rig::new(3);
    let k = kv(1, 6);
    rig.queue.scope(|scope| {
        let append = |position| {
            let item = Item::new(&rig.sequence).append(1);
            let step = Step::new(&rig.space, 0).item(item.append_position(position));
            step.k(&k).v(&k)
        };
        let wrong = scope.append(append(77)).unwrap();
        let beyond = scope.commit(&rig.sequence, 1000).unwrap();
        let fine = scope.truncate(&rig.sequence, 1).unwrap();
        let error = scope.wait(beyond).unwrap().result.unwrap_err();
        assert_eq!(error.status(), Status::Invalid);
        assert!(error.message().contains("1000"), "{error}");
        let error = scope.wait(wrong).unwrap().result.unwrap_err();
        assert_eq!(error.status(), Status::Hole);
        assert!(error.message().contains("77"), "{error}");
        scope.wait(fine).unwrap().result.unwrap();
    });
    assert_eq!(rig.sequence.info().unwrap().n_tokens_max, 1);
}

#[test]
fn the_question_mark_works_on_all_of_it() {
    fn all(rig: &mut Rig) -> Result<u64> {
        let k = kv(1, 7);
        rig.queue.scope(|scope| {
            let item = Item::new(&rig.sequence).append(1);
            let ticket = scope.append(Step::new(&rig.space, 0).item(item).k(&k).v(&k))?;
            scope.wait(ticket)?.result?;
            Ok(rig.sequence.info()?.n_tokens_max)
        })
    }
    assert_eq!(all(&mut Rig::new(3)).unwrap(), 4);
}

#[test]
fn waiting_has_a_limit_and_an_end() {
    let mut rig = Rig::new(0);
    rig.queue.scope(|scope| {
        let start = Instant::now();
        assert!(scope.next(None).unwrap().is_none()); // Nothing is outstanding: no wait.
        let ticket = scope.nop().unwrap();
        while scope
            .next(Some(Duration::from_millis(1)))
            .unwrap()
            .is_none()
        {
            assert!(start.elapsed() < Duration::from_secs(60));
        }
        assert!(scope.wait(ticket).is_err());
        assert_eq!(scope.cancel(ticket).unwrap_err().status(), Status::NotFound);
    });
}

#[test]
fn a_queue_may_move_to_another_thread() {
    let Rig {
        mut queue,
        sequence,
        space,
        ..
    } = Rig::new(2);
    let k = kv(1, 8);
    let thread = std::thread::spawn(move || {
        let step = Step::new(&space, 0).item(Item::new(&sequence).append(1));
        queue.append(step.k(&k).v(&k)).unwrap();
        sequence.info().unwrap().n_tokens_max
    });
    assert_eq!(thread.join().unwrap(), 3);
}

#[test]
fn sequences_come_and_go_by_requests() {
    let mut rig = Rig::new(6);
    let q = queries(1, 3);
    let (parent, space) = (rig.sequence.id(), &rig.space);
    let (made, forked) = rig.queue.scope(|scope| {
        let create = scope
            .create(space, SequenceParams::new().reserve(100))
            .unwrap();
        scope
            .observe(Observe::new(parent, 0).queries(3, 1, &q))
            .unwrap();
        let fork = scope.fork(parent, 4).unwrap();
        let fork = scope.wait(fork).unwrap();
        fork.result.unwrap();
        let create = scope.wait(create).unwrap();
        create.result.unwrap();
        let nop = scope.nop().unwrap();
        assert_eq!(scope.wait(nop).unwrap().sequence, None);
        (create.sequence.unwrap(), fork.sequence.unwrap())
    });
    let made = rig.client.own_sequence(made);
    let forked = rig.client.own_sequence(forked);
    assert_eq!(made.info().unwrap().n_tokens_max, 0);
    assert_eq!(forked.info().unwrap().n_tokens_max, 4);
    assert_eq!(forked.info().unwrap().n_rows_observed, 1);

    let id = made.into_id();
    rig.queue.scope(|scope| {
        let free = scope.free(id).unwrap();
        scope.wait(free).unwrap().result.unwrap();
    });
    let freed = rig.client.own_sequence(id);
    assert_eq!(freed.info().unwrap_err().status(), Status::Stale);
}

#[test]
fn a_sequence_that_nobody_takes_is_freed_with_the_scope() {
    let mut rig = Rig::new(6);
    let before = rig.client.stats().unwrap().n_sequences;
    let space = &rig.space;
    rig.queue.scope(|scope| {
        scope.create(space, SequenceParams::new()).unwrap();
        scope.create(space, SequenceParams::new()).unwrap();
        let nop = scope.nop().unwrap();
        scope.wait(nop).unwrap(); // takes the others from the queue on the way
    });
    // Nobody waits for them to be freed.
    let deadline = Instant::now() + Duration::from_secs(10);
    while rig.client.stats().unwrap().n_sequences != before {
        assert!(Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_flag_ends_waits_and_no_request() {
    let rig = Rig::new(4000);
    let flag = Arc::new(AtomicBool::new(true));
    let params = QueueParams::new().interrupted_by(Arc::clone(&flag));
    let mut queue = rig.client.create_queue(&params).unwrap();
    drop(params);
    let rows = 4000;
    let q = queries(rows, 1);
    let mut o = vec![0.0f32; rows * Q_HEADS * DIM];
    let item = Item::new(&rig.sequence).query(rows as u32);
    let step = Step::new(&rig.space, 0).item(item).f32_values();
    queue.scope(|scope| {
        let ticket = scope.attend(step.q(&q).o(&mut o[..])).unwrap();
        match scope.wait(ticket) {
            // A fast machine is done before it is asked for the first time.
            Ok(done) => drop(done.result.unwrap()),
            Err(error) => {
                assert_eq!(error.status(), Status::Interrupted);
                flag.store(false, Ordering::Relaxed);
                scope.wait(ticket).unwrap().result.unwrap();
                // The end of a scope waits whatever the flag says.
                flag.store(true, Ordering::Relaxed);
                scope.nop().unwrap();
            }
        }
    });
    let last = rows - 1;
    let row = last * Q_HEADS * DIM..rows * Q_HEADS * DIM;
    let (expected, _) = oracle(&q[row.clone()], &rig.k, &rig.v, |_| true);
    assert_close(&o[row], &expected, CLOSE);
}
