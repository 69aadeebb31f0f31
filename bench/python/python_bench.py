#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a call through the Python package costs over the same call in C.

Usage: python_bench.py --include FOLDER --lib FOLDER [--kvmd PATH] [--rounds N] [--json FILE]
Needs the package kvm on PYTHONPATH and a C compiler. The step is a query of one token over 64
tokens in one layer, over an engine of one thread in the process, and through kvmd. Each round times
C and every case of Python one after the other, so that all see the same machine; what is printed
is the median of the rounds, and of the differences to C in the same round."""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import tempfile
import time

import numpy

import kvm

N_STEPS = 2000
# The step in C. Its argument is a socket ("": an engine in this process). Each line that it reads
# is a number of steps; it answers the nanoseconds of one.
C_STEP = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kvm.h"

#define CHECK(call)                                         \
  do {                                                      \
    if ((call) != KVM_OK) {                                 \
      fprintf(stderr, "%s: %s\n", #call, kvm_last_error()); \
      exit(1);                                              \
    }                                                       \
  } while (0)

enum { kTokens = 64, kQHeads = 4, kKvHeads = 2, kDim = 16 };

static double now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

int main(int argc, char **argv) {
  static float keys[kTokens * kKvHeads * kDim];
  static float q[kQHeads * kDim];
  static float o[kQHeads * kDim];
  kvm_client *client = NULL;
  kvm_queue *queue = NULL;
  kvm_space_id space = 0;
  kvm_seq_id seq = 0;
  if (argc > 1 && argv[1][0] != '\0') {
    kvm_connect_params params = {.struct_size = sizeof params, .socket_path = argv[1]};
    CHECK(kvm_connect(&params, &client));
  } else {
    kvm_embedded_params params = {.struct_size = sizeof params, .n_threads = 1};
    CHECK(kvm_open_embedded(&params, &client));
  }
  CHECK(kvm_queue_create(client, NULL, &queue));
  kvm_space_params geometry = {.struct_size = sizeof geometry, .name = "c_step", .n_layers = 1,
                               .n_q_heads = kQHeads, .n_kv_heads = kKvHeads, .head_dim_k = kDim,
                               .dtype = KVM_DTYPE_F32};
  CHECK(kvm_space_register(client, &geometry, &space));
  CHECK(kvm_seq_create(client, space, NULL, &seq));
  kvm_item item = {.seq = seq, .n_append = kTokens, .append_position = KVM_POSITION_END,
                   .query_position = KVM_POSITION_END};
  kvm_step_params step = {.struct_size = sizeof step, .space = space, .n_items = 1, .items = &item};
  step.k = step.v = kvm_host_tensor(keys, sizeof keys, KVM_DTYPE_F32);
  CHECK(kvm_append(queue, &step));
  memset(&step.k, 0, sizeof step.k);
  memset(&step.v, 0, sizeof step.v);
  item.n_append = 0;
  item.n_query = 1;
  step.q = kvm_host_tensor(q, sizeof q, KVM_DTYPE_F32);
  step.o = kvm_host_tensor(o, sizeof o, KVM_DTYPE_F32);
  long n = 0;
  while (scanf("%ld", &n) == 1) {
    const double begin = now_ns();
    for (long i = 0; i < n; ++i) {
      kvm_step_stats stats = {.struct_size = sizeof stats};
      CHECK(kvm_attend(queue, &step, &stats));
    }
    printf("%.1f\n", (now_ns() - begin) / (double)n);
    fflush(stdout);
  }
  kvm_client_close(client);
  return 0;
}
"""


class InC:
    """The program C_STEP on its way."""

    def __init__(self, program, socket):
        self.process = subprocess.Popen([program, socket], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)

    def time_us(self):
        self.process.stdin.write(f"{N_STEPS}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline()) / 1e3

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def cases(client):
    """Name -> a function that makes one step."""
    space = client.register_space("c_step", n_layers=1, n_q_heads=4, n_kv_heads=2, head_dim=16,
                                  codec="float32")
    seq = space.create_sequence()
    k, q = numpy.zeros((64, 2, 16), "float32"), numpy.zeros((1, 4, 16), "float32")
    client.step(space, 0, [kvm.Item(seq, append=64)], k=k, v=k)
    queue = client.create_queue()
    o = numpy.empty_like(q)
    prepared = kvm.Step(space, 0, [kvm.Item(seq, query=1)], q=q, o=o)
    item = kvm.Item(seq, query=1)
    made = {
        "prepared step": lambda: queue.run(prepared),
        "step, NumPy": lambda: queue.step(space, 0, [item], q=q, o=o),
        "step, NumPy, new output and item": lambda: queue.step(
            space, 0, [kvm.Item(seq, query=1)], q=q),
        "request of a prepared step": lambda: queue.start(prepared).result(),
    }
    if importlib.util.find_spec("torch"):
        import torch
        of_torch, o_torch = torch.zeros(1, 4, 16), torch.empty(1, 4, 16)
        made["step, PyTorch"] = lambda: queue.step(space, 0, [item], q=of_torch, o=o_torch)
    return made


def time_us(call):
    begin = time.perf_counter_ns()
    for _ in range(N_STEPS):
        call()
    return (time.perf_counter_ns() - begin) / N_STEPS / 1e3


def measure(where, client, in_c, rounds):
    in_python = cases(client)
    times = {name: [] for name in ("C", *in_python)}
    for i in range(rounds + 1):  # the first one warms up
        found = {"C": in_c.time_us()}
        for name, call in in_python.items():
            found[name] = time_us(call)
        if i > 0:
            for name, us in found.items():
                times[name].append(us)
    results = []
    for name, us in times.items():
        over = [mine - c for mine, c in zip(us, times["C"])]
        results.append({"bench": "python", "case": f"{where}: {name}",
                        "us": round(statistics.median(us), 3),
                        "over_c_us": round(statistics.median(over), 3),
                        "over_c_us_min": round(min(over), 3), "over_c_us_max": round(max(over), 3),
                        "rounds": rounds})
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--include", required=True)
    parser.add_argument("--lib", required=True)
    parser.add_argument("--kvmd")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        program = os.path.join(folder, "c_step")
        subprocess.run(["cc", "-O2", "-x", "c", "-", "-o", program, "-x", "none",
                        "-I", arguments.include,
                        "-L", arguments.lib, "-lkvm_embedded",
                        f"-Wl,-rpath,{os.path.abspath(arguments.lib)}"],
                       input=C_STEP, text=True, check=True)
        in_c = InC(program, "")
        with kvm.open_embedded(n_threads=1, capacity=64 << 20) as client:
            results += measure("embedded", client, in_c, arguments.rounds)
        in_c.close()
        if arguments.kvmd:
            socket = os.path.join(folder, "kvmd.sock")
            kvmd = subprocess.Popen([arguments.kvmd, "--socket", socket],
                                    stderr=subprocess.DEVNULL)
            while True:
                try:
                    client = kvm.connect(socket)
                    break
                except kvm.DisconnectedError:
                    time.sleep(0.01)
            in_c = InC(program, socket)
            with client:
                results += measure("kvmd", client, in_c, arguments.rounds)
            in_c.close()
            kvmd.terminate()
            kvmd.wait()
    for result in results:
        print(f"{result['case']:45} {result['us']:8.2f} us   over C {result['over_c_us']:7.2f} us "
              f"({result['over_c_us_min']:.2f} to {result['over_c_us_max']:.2f})")
    if arguments.json:
        with open(arguments.json, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(result) + "\n" for result in results)


if __name__ == "__main__":
    main()
