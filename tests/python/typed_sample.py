# SPDX-License-Identifier: Apache-2.0
"""A program that mypy --strict must accept (binding_test.py); it is not run."""

import asyncio

import kvm


async def decode(client: kvm.Client, space: kvm.Space, n: int) -> list[kvm.StepStats]:
    with client.create_queue() as queue, space.create_sequence() as seq:
        k = client.empty((1, 2, 16))
        q = client.empty((1, 4, 16))
        requests: list[kvm.Request[kvm.StepResult]] = [
            queue.step_async(space, 0, [kvm.Item(seq, append=1, query=1)], k=k, v=k, q=q)
            for _ in range(n)]
        results: list[kvm.StepResult] = await asyncio.gather(*requests)
        fork: kvm.Sequence = await queue.fork_async(seq)
        tokens: int = fork.info().n_tokens_max
        hashes: kvm.PrefixHashes = space.prefix_hashes(range(100), salt=b"salt")
        chat, n_found = space.fork_prefix(hashes.up_to(99))
        print(n_found + len(chat), await queue.publish_prefix_async(chat, hashes, keep=60) > 0)
        print(tokens, kvm.merge([(results[0].o, results[0].lse)]))
        return [result.stats for result in results]


def main() -> None:
    with kvm.open_embedded(n_threads=1) as client:
        space = client.register_space("sample", n_layers=1, n_q_heads=4, n_kv_heads=2, head_dim=16,
                                      policies=[kvm.Policy(kvm.Retention.FULL)])
        try:
            stats = asyncio.run(decode(client, space, 3))
            print(stats[0].mode is kvm.Mode.EXACT)
        except kvm.FullError as error:
            print(error.status.name, error.message)
