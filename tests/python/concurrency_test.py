#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The Python package under requests on their way, event loops, signals, threads, processes and the
end of the interpreter."""

import asyncio
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import unittest

import numpy

import kvm
from rig import PACKAGE, Daemon, Rig, attention, daemon, open_client, over_both

LONG_S = 0.3  # how long a request shall take that others overtake; the sleeps here are 0.01 to 0.05


class Slow:
    """A request that takes LONG_S or a share of it, at any speed of the build: as many rows over
    many tokens as that takes. It has many heads, for whoever uses an engine in this process waits
    for the tasks that its threads are in, and a head is a task or more."""

    N_HEADS, HEAD_DIM = 32, 32
    row_s = {}  # by kind of client and tokens

    def __init__(self, rig, share=1.0, n_tokens=4096):
        self.space = rig.space(n_q_heads=self.N_HEADS, n_kv_heads=self.N_HEADS,
                               head_dim=self.HEAD_DIM)
        self.seq = self.space.create_sequence()
        k = rig.normal(n_tokens, self.N_HEADS, self.HEAD_DIM)
        rig.client.step(self.space, 0, [kvm.Item(self.seq, append=n_tokens)], k=k, v=k)
        if (rig.kind, n_tokens) not in self.row_s:
            self.row_s[rig.kind, n_tokens] = self.measure(rig)
        row_s = self.row_s[rig.kind, n_tokens]
        n_rows = min(max(round(share * LONG_S / row_s), 8), 4096)
        self.q = rig.client.empty((n_rows, self.N_HEADS, self.HEAD_DIM))
        self.q[...] = rig.normal(n_rows, self.N_HEADS, self.HEAD_DIM)
        self.o = rig.client.empty(self.q.shape)

    def measure(self, rig):
        """Seconds a row, at the best: of so many rows that what a request takes by itself does not
        show, and of several tries, for others compute beside the tests."""
        n, took = 16, 0.0
        while took < LONG_S / 6 and n < 4096:
            n *= 2
            q = rig.normal(n, self.N_HEADS, self.HEAD_DIM)
            took = min(self.time(rig, q) for _ in range(4))
        return took / n

    def time(self, rig, q):
        begin = time.monotonic()
        rig.client.step(self.space, 0, [kvm.Item(self.seq, query=len(q))], q=q)
        return time.monotonic() - begin

    def start(self, queue):
        return queue.step_async(self.space, 0, [kvm.Item(self.seq, query=len(self.q))], q=self.q,
                                o=self.o)


@over_both
class Requests:
    def test_results_in_any_order(self):
        space = self.space()
        seq, k, v = self.prompt(space, 40)
        with self.client.create_queue() as queue:
            qs = [self.normal(1, 4, 16) for _ in range(50)]
            requests = [queue.step_async(space, 0, [kvm.Item(seq, query=1)], q=q) for q in qs]
            for i in numpy.random.default_rng(1).permutation(50):
                o = requests[i].result(timeout=10).o
                self.assert_close(o, attention(qs[i], k, v, [39])[0])
            self.assertTrue(all(request.done() for request in requests))
            self.assertEqual(requests[0].status(), kvm.Status.OK)
            self.assertEqual(queue.n_outstanding, 0)
            self.assertIs(requests[3].result(), requests[3].result())

    def test_a_failed_request_raises_each_time(self):
        space = self.space()
        seq = space.create_sequence()
        with self.client.create_queue() as queue:
            request = queue.step_async(space, 0, [kvm.Item(seq, query=1)], q=self.normal(1, 4, 16))
            for _ in range(2):
                with self.assert_refused(kvm.Status.INVALID, kvm.InvalidError, "layer 0"):
                    request.result()
            self.assertEqual(request.status(), kvm.Status.INVALID)

    def test_items_that_nobody_else_keeps(self):
        """They, and their sequences, live as long as the step."""
        space, k = self.space(), self.normal(1, 2, 16)
        with self.client.create_queue() as queue:
            for step in (queue.step, lambda *a, **b: queue.step_async(*a, **b).result()):
                items = (kvm.Item(space.create_sequence(), append=1, append_row=0)
                         for _ in range(20))
                step(space, 0, items, k=k, v=k)

    def test_a_step_when_there_is_no_room(self):
        space = self.space()
        seq, k, v = self.prompt(space, 4)
        q = self.normal(1, 4, 16)
        with self.client.create_queue(n_entries=4) as queue:
            requests = [queue.nop_async() for _ in range(4)]
            o = queue.step(space, 0, [kvm.Item(seq, query=1)], q=q).o
            self.assert_close(o, attention(q, k, v, [3])[0])
            for request in requests:
                request.result(timeout=10)

    def test_more_than_there_is_room_for(self):
        with self.client.create_queue(n_entries=4) as queue:
            requests = [queue.nop_async() for _ in range(100)]
            for request in requests:
                self.assertIsNone(request.result(timeout=10))

    def test_submitted_later(self):
        space = self.space()
        seq, _, _ = self.prompt(space, 4)
        with self.client.create_queue() as queue:
            request = queue.step_async(space, 0, [kvm.Item(seq, query=1)], q=self.normal(1, 4, 16),
                                       submit=False)
            self.assertFalse(request.done())
            queue.submit()
            request.result(timeout=10)

    def test_a_wait_submits_what_was_to_be_submitted_later(self):
        space = self.space()
        seq, k, v = self.prompt(space, 4)
        q = self.normal(1, 4, 16)
        with self.client.create_queue() as queue:
            for wait in (lambda r: r.result(timeout=10), lambda r: r.wait(10),
                         lambda r: asyncio.run(self.ends(r))):
                requests = [queue.step_async(space, 0, [kvm.Item(seq, query=1)], q=q, submit=False)
                            for _ in range(3)]
                self.assertFalse(any(request.done() for request in requests))
                wait(requests[2])
                for request in requests:
                    self.assert_close(request.result(timeout=10).o, attention(q, k, v, [3])[0])

    async def ends(self, request):
        await asyncio.wait_for(request, 10)

    def test_a_wait_submits_while_another_thread_waits(self):
        slow = Slow(self)
        with self.client.create_queue() as queue:
            request = slow.start(queue)
            thread = threading.Thread(target=request.result)
            thread.start()
            time.sleep(0.02)
            later = queue.start(kvm.Step(slow.space, 0, [kvm.Item(slow.seq, query=1)],
                                         q=slow.q[:1], o=numpy.empty_like(slow.q[:1])),
                                submit=False)
            later.result(timeout=10)
            thread.join()

    def test_poll_ends_what_nobody_waits_for(self):
        with self.client.create_queue() as queue:
            queue.fileno()
            request = queue.nop_async()
            deadline = time.monotonic() + 10
            while not request.done():
                self.assertLess(time.monotonic(), deadline)
                queue.poll()

    def test_timeout_and_cancel(self):
        slow = Slow(self)
        with self.client.create_queue() as queue:
            first = slow.start(queue)
            rest = [slow.start(queue) for _ in range(3)]
            with self.assertRaises(TimeoutError):
                first.result(timeout=0.02)
            with self.assertRaisesRegex(ValueError, "timeout is -1"):
                first.result(timeout=-1)
            for request in rest:
                request.cancel()
            first.result()
            statuses = []
            for request in rest:
                request.wait()
                statuses.append(request.status())
            self.assertIn(kvm.Status.CANCELLED, statuses)
            self.assertLessEqual(set(statuses), {kvm.Status.CANCELLED, kvm.Status.OK})
            with self.assert_refused(kvm.Status.CANCELLED, kvm.CancelledError):
                rest[statuses.index(kvm.Status.CANCELLED)].result()
            rest[0].cancel()  # done: nothing happens

    def test_a_queue_closed_with_requests_on_their_way(self):
        slow = Slow(self, share=0.5)
        queue = self.client.create_queue()
        requests = [slow.start(queue) for _ in range(5)]
        queue.close()
        for request in requests:
            self.assertTrue(request.done())
            self.assertEqual(request.status(), kvm.Status.CANCELLED)
            with self.assert_refused(kvm.Status.CANCELLED, kvm.CancelledError, "closed"):
                request.result()


@over_both
class Loops:
    async def gather(self, queue, n=100):
        space = self.space()
        seq = await queue.create_sequence_async(space)
        k, v = self.normal(n, 2, 16), self.normal(n, 2, 16)
        q = self.normal(n, 4, 16)
        results = await asyncio.gather(*(
            queue.step_async(space, 0, [kvm.Item(seq, append=1, query=1)], k=k[i:i + 1],
                             v=v[i:i + 1], q=q[i:i + 1]) for i in range(n)))
        o, _ = attention(q, k, v, range(n))
        for i in range(n):
            self.assert_close(results[i].o[0], o[i])
        await queue.truncate_async(seq, 3)
        await queue.commit_async(seq)
        fork = await queue.fork_async(seq)
        self.assertEqual(len(fork), 3)
        await queue.free_async(seq)

    def test_gather(self):
        with self.client.create_queue() as queue:
            asyncio.run(self.gather(queue))

    def test_two_loops_one_after_another(self):
        with self.client.create_queue() as queue:
            for _ in range(2):
                asyncio.run(self.gather(queue, 20))
            self.assertFalse(any(w._futures for w in queue._watchers.values()))

    def test_a_loop_that_was_left_in_the_middle(self):
        slow = Slow(self, share=0.5)
        with self.client.create_queue() as queue:
            loop = asyncio.new_event_loop()
            task = loop.create_task(self.wait_for(slow.start(queue)))
            loop.run_until_complete(asyncio.sleep(0))
            loop.run_until_complete(asyncio.sleep(0))
            asyncio.run(self.gather(queue, 20))
            loop.run_until_complete(task)
            loop.close()
            asyncio.run(self.gather(queue, 5))

    async def wait_for(self, request):
        return await request

    def test_two_tasks_wait_for_one_request(self):
        async def run(queue):
            request = slow.start(queue)
            results = await asyncio.wait_for(asyncio.gather(
                self.wait_for(request), self.wait_for(request)), 30)
            self.assertIs(results[0], results[1])
        slow = Slow(self, share=0.25)
        with self.client.create_queue() as queue:
            asyncio.run(run(queue))

    def test_two_loops_at_once(self):
        def run():
            try:
                asyncio.run(self.gather(queue, 20))
            except BaseException as error:
                errors.append(error)
        errors = []
        with self.client.create_queue() as queue:
            threads = [threading.Thread(target=run) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
                self.assertFalse(thread.is_alive())
        self.assertEqual(errors, [])

    def test_a_cancelled_task(self):
        async def run():
            task = asyncio.create_task(self.wait_for(slow.start(queue)))
            other = asyncio.create_task(self.wait_for(queue.nop_async()))
            await asyncio.sleep(0.01)
            task.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await task
            await other
            await self.gather(queue, 10)
        slow = Slow(self, share=0.5)
        with self.client.create_queue() as queue:
            asyncio.run(run())

    def test_a_timeout_of_the_loop(self):
        async def run():
            request = slow.start(queue)
            with self.assertRaises(asyncio.TimeoutError):
                await asyncio.wait_for(request, 0.01)
            await request
        slow = Slow(self)
        with self.client.create_queue() as queue:
            asyncio.run(run())

    def test_a_queue_closed_while_tasks_wait(self):
        async def run():
            task = asyncio.create_task(self.wait_for(slow.start(queue)))
            await asyncio.sleep(0.01)
            await asyncio.get_running_loop().run_in_executor(None, queue.close)
            with self.assertRaises(kvm.CancelledError):
                await asyncio.wait_for(task, 10)
            with self.client.create_queue() as other:
                await other.nop_async()
        slow = Slow(self, share=4)  # it is to be under way still when the queue closes
        queue = self.client.create_queue()
        asyncio.run(run())

    def test_without_a_descriptor(self):
        async def run():
            await asyncio.gather(*(queue.nop_async() for _ in range(10)))
        with self.client.create_queue() as queue:
            queue.fileno = lambda: -1
            asyncio.run(run())


class Deaths(Rig):
    """What only a kvmd can do: die."""

    kind = "daemon"

    def setUp(self):
        self.random = numpy.random.default_rng(3)
        self.spaces = []
        self.own = Daemon()
        self.own.start()
        self.addCleanup(self.own.remove)
        self.client = kvm.connect(self.own.socket)
        self.addCleanup(self.client.close)

    def drop_spaces(self):
        pass

    def test_tasks_get_an_exception(self):
        async def run(queue):
            tasks = [asyncio.create_task(self.wait_for(slow.start(queue))) for _ in range(5)]
            await asyncio.sleep(0.01)
            self.own.kill()
            found = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
            self.assertIsInstance(found[-1], kvm.DisconnectedError)
        slow = Slow(self)
        with self.client.create_queue() as queue:
            asyncio.run(run(queue))
            with self.assertRaises(kvm.DisconnectedError):
                queue.nop_async().result(10)

    async def wait_for(self, request):
        return await request

    def test_waits_get_an_exception(self):
        slow = Slow(self)
        with self.client.create_queue() as queue:
            request = slow.start(queue)
            threading.Timer(0.02, self.own.kill).start()
            with self.assertRaises(kvm.DisconnectedError):
                request.result()
            self.assertEqual(request.status(), kvm.Status.DISCONNECTED)

    def test_reconnect(self):
        array = self.client.empty(1000)
        space = self.space()
        seq, _, _ = self.prompt(space, 3)
        self.own.kill()
        with self.assertRaises(kvm.DisconnectedError):
            self.client.stats()
        self.own.start()
        with self.assert_refused(kvm.Status.BUSY, kvm.Error):
            self.client.reconnect()  # there is an array
        del array
        self.client.reconnect()
        self.client.reconnect()
        with self.assert_refused(kvm.Status.LOST, kvm.NotFoundError):
            seq.info()
        del seq
        space = self.space()
        seq, k, v = self.prompt(space, 3)
        q = self.client.empty((1, 4, 16))
        q[...] = 0.5
        o = self.client.step(space, 0, [kvm.Item(seq, query=1)], q=q).o
        self.assert_close(o, attention(q, k, v, [2])[0])


SIGNALS = """
import os, signal, sys, threading, time
import numpy, kvm
client = kvm.connect(sys.argv[1]) if sys.argv[1] else kvm.open_embedded(n_threads=1)
space = client.register_space("s%d" % os.getpid(), n_layers=1, n_q_heads=8, n_kv_heads=1,
                              head_dim=128)
seq = space.create_sequence()
k = numpy.random.standard_normal((8192, 1, 128)).astype("float32")
client.step(space, 0, [kvm.Item(seq, append=8192)], k=k, v=k)
queue = client.create_queue()
def probe():
    q = numpy.ones((16, 8, 128), "float32")
    begin = time.monotonic()
    queue.step(space, 0, [kvm.Item(seq, query=16)], q=q)
    return (time.monotonic() - begin) / 16
n_rows = min(max(round(0.4 / min(probe() for _ in range(3))), 8), 4096)
q, o = client.empty((n_rows, 8, 128)), client.empty((n_rows, 8, 128))
q[...] = numpy.random.standard_normal(q.shape)
calls = []
def handler(number, frame):
    calls.append(client.stats().n_sequences)
    calls.append(len(seq))
    queue.nop_async()
    queue.poll()
signal.signal(signal.SIGUSR1, handler)
def interrupt():
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGUSR1)
    deadline = time.monotonic() + 5
    while len(calls) < 2 and time.monotonic() < deadline:  # else Python runs SIGINT's first
        time.sleep(0.01)
    global sent
    sent = time.monotonic()
    os.kill(os.getpid(), signal.SIGINT)
requests = [queue.step_async(space, 0, [kvm.Item(seq, query=n_rows)], q=q, o=o)
            for _ in range(5)]
threading.Thread(target=interrupt).start()
try:
    requests[-1].result()
    print("it was not interrupted")
except KeyboardInterrupt:
    took = time.monotonic() - sent
    print("interrupted" if took < 1 else f"after {took} s", len(calls))
for request in requests:
    request.cancel()
print(client.step(space, 0, [kvm.Item(seq, query=1)], q=q[:1]).o.shape, client.ping() > 0)
client.close()
"""


@over_both
class Signals:
    def test_control_c_in_a_long_wait(self):
        done = run_python(SIGNALS, "" if self.kind == "embedded" else daemon().socket)
        self.assertEqual((done.returncode, done.stdout, done.stderr),
                         (0, "interrupted 2\n(1, 8, 128) True\n", ""))


def run_python(code, *arguments, timeout=60):
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=timeout,
        check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(
            [os.path.dirname(PACKAGE), os.path.dirname(os.path.abspath(__file__))])})


@over_both
class Threads:
    def run_threads(self, n, work, timeout=30):
        errors = []

        def guarded(i):
            try:
                work(i)
            except BaseException as error:
                errors.append(error)
        threads = [threading.Thread(target=guarded, args=(i,), daemon=True) for i in range(n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout)
            self.assertFalse(thread.is_alive(), "a thread hangs")
        if errors:
            raise errors[0]

    def test_eight_threads_use_a_client(self):
        def work(i):
            random = numpy.random.default_rng(i)
            with space.create_sequence() as seq:
                k = random.standard_normal((50, 2, 16), "float32")
                q = random.standard_normal((1, 4, 16), "float32")
                for n in range(50):
                    o = self.client.step(space, 0, [kvm.Item(seq, append=1, query=1)],
                                         k=k[n:n + 1], v=k[n:n + 1], q=q).o
                self.assert_close(o, attention(q, k, k, [49])[0])
                self.client.stats()
        space = self.space()
        self.run_threads(8, work)

    def test_four_threads_share_a_queue(self):
        slowest = []

        def work(i):
            begin = time.monotonic()
            for n in range(100):
                if n % 3:
                    queue.nop_async().result(timeout=20)
                else:
                    queue.step(space, 0, [kvm.Item(seqs[i], query=1)], q=q)
            slowest.append(time.monotonic() - begin)
        space = self.space()
        seqs = [self.prompt(space, 30)[0] for _ in range(4)]
        q = self.normal(1, 4, 16)
        with self.client.create_queue() as queue:
            self.run_threads(4, work)
        self.assertEqual(len(slowest), 4)

    def test_short_requests_beside_a_long_wait_on_one_queue(self):
        slow = Slow(self, share=3)
        done = []
        with self.client.create_queue() as queue:
            queue.fileno()  # embedded: computes without being waited for
            request = slow.start(queue)
            waiter = threading.Thread(target=lambda: done.append(request.result()))
            waiter.start()
            for _ in range(5):
                queue.nop_async()
                queue.poll()
            while_it_ran = not done
            waiter.join(60)
        self.assertTrue(while_it_ran)
        self.assertEqual(len(done), 1)

    def test_the_interpreter_runs_on(self):
        slow = Slow(self)
        counts, stop = [0], threading.Event()

        def count():
            while not stop.is_set():
                counts[0] += 1
        counter = threading.Thread(target=count)
        with self.client.create_queue() as queue:
            request = slow.start(queue)
            counter.start()
            before = counts[0]
            request.result()
            after = counts[0]
            stop.set()
            counter.join()
        self.assertGreater(after - before, 1000)

    def test_closed_while_others_work(self):
        slow = Slow(self)
        errors = []

        def work():
            try:
                with self.client.create_queue() as queue:
                    while True:
                        slow.start(queue).result()
            except kvm.Error as error:
                errors.append(error)

        def ask():
            try:
                while True:
                    self.client.stats()
                    slow.seq.info()
            except kvm.Error as error:
                errors.append(error)
        threads = [threading.Thread(target=f, daemon=True) for f in (work, ask, ask)]
        for thread in threads:
            thread.start()
        time.sleep(0.05)
        self.client.close()
        for thread in threads:
            thread.join(30)
            self.assertFalse(thread.is_alive(), "a thread hangs")
        self.assertEqual(len(errors), 3)
        self.assertLessEqual({error.status for error in errors},
                             {kvm.Status.DISCONNECTED, kvm.Status.CANCELLED})


def in_child(client, space, queue, socket, pipe):
    """What a child may do."""
    found = []
    if client is not None:
        for call in (client.stats, client.ping, queue.nop_async, lambda: queue.n_outstanding,
                     space.create_sequence, queue.fileno, lambda: client.empty(3)):
            try:
                call()
                found.append("no error")
            except kvm.RefusedError as error:
                found.append(error.status.name)
        client.close()
        queue.close()
        gc.collect()
    own = kvm.connect(socket) if socket else kvm.open_embedded(n_threads=1)
    with own:
        mine = own.register_space(f"child.{os.getpid()}", n_layers=1, n_q_heads=4, n_kv_heads=2,
                                  head_dim=16)
        seq = mine.create_sequence()
        k, q = numpy.ones((1, 2, 16), "float32"), numpy.ones((1, 4, 16), "float32")
        o = own.step(mine, 0, [kvm.Item(seq, append=1, query=1)], k=k, v=k, q=q).o
        found.append(float(o.mean()))
        seq.free()
        mine.drop()
    pipe.send(found)


@over_both
class Processes:
    def run_child(self, method, with_client):
        space = self.space()
        seq, k, v = self.prompt(space, 5)
        array = self.client.empty(100)
        array[...] = 2
        queue = self.client.create_queue()
        request = queue.nop_async()
        context = multiprocessing.get_context(method)
        mine, other = context.Pipe()
        socket = None if self.kind == "embedded" else daemon().socket
        handles = (self.client, space, queue) if with_client else (None, None, None)
        child = context.Process(target=in_child, args=(*handles, socket, other))
        child.start()
        self.assertTrue(mine.poll(60), "the child says nothing")
        found = mine.recv()
        child.join(30)
        self.assertEqual(child.exitcode, 0)
        request.result(timeout=10)
        self.assertEqual(array.sum(), 200)
        q = self.normal(1, 4, 16)
        got = self.client.step(space, 0, [kvm.Item(seq, query=1)], q=q).o
        self.assert_close(got, attention(q, k, v, [4])[0])
        return found

    def test_fork(self):
        self.assertEqual(self.run_child("fork", True), ["FORKED"] * 7 + [1.0])

    def test_spawn(self):
        self.assertEqual(self.run_child("spawn", False), [1.0])

    def test_fork_while_a_thread_waits(self):
        slow = Slow(self)
        with self.client.create_queue() as queue:
            request = slow.start(queue)
            waiter = threading.Thread(target=request.result)
            waiter.start()
            time.sleep(0.02)
            pid = os.fork()
            if pid == 0:
                try:
                    try:
                        queue.nop_async()
                        os._exit(1)
                    except kvm.RefusedError:
                        pass
                    del request, slow
                    self.client.close()
                    gc.collect()
                    os._exit(0)
                finally:
                    os._exit(2)
            self.assertEqual(os.waitpid(pid, 0)[1], 0)
            waiter.join(60)


ENDS = {
    "open clients, queues, sequences and arrays": """
array = client.empty((5, 5))
queue = client.create_queue()
request = queue.nop_async()
""",
    "a cycle": "cycle = [client, seq]; cycle.append(cycle)",
    "a listener": "kvm.set_log(lambda level, message: print(message))",
    "no atexit": "import atexit; atexit._clear()",
    "requests on their way": """
q = numpy.ones((100, 4, 16), "float32")
k = numpy.ones((100, 2, 16), "float32")
queue = client.create_queue()
requests = [queue.step_async(space, 0, [kvm.Item(seq, append=100, query=100)], k=k, v=k, q=q)
            for _ in range(20)]
""",
    "a thread in a call": """
import threading, time
def work():
    queue = client.create_queue()
    try:
        while True:
            queue.nop_async().result()
    except kvm.Error:
        while True:
            time.sleep(0.001)
threading.Thread(target=work, daemon=True).start()
time.sleep(0.05)
""",
    "a thread in a call, no atexit": """
import atexit, threading, time
atexit._clear()
def work():
    queue = client.create_queue()
    while True:
        queue.nop_async().result()
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.05)
""",
    "sys.exit in a with block": """
with client, client.create_queue() as queue:
    sys.exit(0)
""",
    "a module that keeps it": "import builtins; builtins.kept = (client, seq, client.empty(3))",
}


@over_both
class Ends:
    def test_the_interpreter_ends_in_silence(self):
        head = f"""
import sys, numpy, kvm
client = {'kvm.open_embedded(n_threads=1)' if self.kind == "embedded"
          else 'kvm.connect(sys.argv[1])'}
space = client.register_space("ends.{os.getpid()}", n_layers=1, n_q_heads=4, n_kv_heads=2,
                              head_dim=16)
seq = space.create_sequence()
"""
        for name, code in ENDS.items():
            with self.subTest(name):
                done = run_python(head + code, daemon().socket)
                self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "", ""))


if __name__ == "__main__":
    unittest.main()
