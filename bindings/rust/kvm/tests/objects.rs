// SPDX-License-Identifier: Apache-2.0
//! Clients, spaces and sequences: who owns what, and what is left when it is dropped.

mod common;

use common::*;
use kvm::{ArenaBuffer, Client, Completion, Heads, Index, IndexKind, Item, LayerKind, LayerParams};
use kvm::{Policy, PrefixHash, PrefixHashes, Queue, Read, Rope, Sequence, SequenceParams, Space};
use kvm::{SpaceParams, Status, Step};

#[test]
fn a_client_tells_what_it_is() {
    let client = open();
    let info = client.info().unwrap();
    assert_eq!(info.is_embedded, !is_daemon());
    assert!(info.max_items > 0 && info.quota_bytes <= info.host_capacity_bytes);
    assert!(["scalar", "avx2", "avx512", "avx512bf16"].contains(&info.isa.as_str()));
    assert_eq!(info.server_version, kvm::version_string());
    let ours = info.server_pid == std::process::id();
    assert_eq!(ours, info.is_embedded);
    assert!(client.ping().unwrap() < std::time::Duration::from_secs(60));
    let before = client.stats().unwrap();
    drop(Rig::new(3));
    let text = client.stats_text().unwrap();
    assert!(text.lines().any(|line| line.starts_with("kvm_")));
    if is_daemon() {
        let after = client.stats().unwrap();
        assert!(after.n_tokens_appended >= before.n_tokens_appended + 3 * u64::from(LAYERS));
    }
}

#[test]
fn spaces_are_found_described_and_removed() {
    let client = open();
    let (name, other) = (name("space"), name("other"));
    let angles: Vec<f32> = (0..4).map(|i| 10f32.powi(-i)).collect();
    let params = |name: &str| {
        SpaceParams::new(name, 3, 8, 16)
            .kv_heads(2)
            .head_dim_v(32)
            .stored_as(kvm::CodecId::F16)
            .fingerprint([9; 32])
            .rope(Rope::Interleaved, &angles)
            .softmax_scale(0.5)
            .logit_softcap(30.0)
            .shard(1, 2)
            .sink_logits(&[0.25; 3 * 8])
            .layer(LayerParams::new(2..3).kind(LayerKind::Alias { target: 1 }))
    };
    let space = client.register_space(&params(&name)).unwrap();
    assert_eq!(
        client.register_space(&params(&name)).unwrap().id(),
        space.id()
    );
    assert_eq!(client.find_space(&name).unwrap().id(), space.id());
    let error = client
        .register_space(&params(&name).softmax_scale(0.4))
        .unwrap_err();
    assert_eq!(error.status(), Status::Exists);
    assert!(error.message().contains("softmax_scale"), "{error}");
    let info = space.info().unwrap();
    assert_eq!(
        (info.name.as_str(), info.space),
        (name.as_str(), space.id())
    );
    assert_eq!((info.n_layers, info.n_q_heads, info.n_kv_heads), (3, 8, 2));
    assert_eq!((info.head_dim_k, info.head_dim_v), (16, 32));
    assert_eq!((info.codec, info.fingerprint), (kvm::CodecId::F16, [9; 32]));
    assert!(client.spaces().unwrap().contains(&info));

    let second = client.register_space(&params(&other)).unwrap();
    let sequence = second.create_sequence().unwrap();
    assert_eq!(second.clone().remove().unwrap_err().status(), Status::Busy);
    sequence.free().unwrap();
    second.clone().remove().unwrap();
    assert_eq!(second.info().unwrap_err().status(), Status::Stale);
    assert_eq!(
        client.find_space(&other).unwrap_err().status(),
        Status::NotFound
    );
}

/// Numbers that C would read beyond, or take for "all".
#[test]
fn a_space_with_wrong_arrays_or_empty_ranges_is_refused_here() {
    let client = open();
    let index = |heads| geometry().index(Index::new(heads, IndexKind::Sketch));
    let policy = |heads| geometry().policy(Policy::full(heads));
    for params in [
        geometry().sink_logits(&[]),
        geometry().sink_logits(&[0.0; 7]),
        geometry().alibi_slopes(&[]),
        geometry().alibi_slopes(&[0.5; 3]),
        SpaceParams::new("zero\0byte", 1, 1, 8),
        geometry().layer(LayerParams::new(1..1)),
        policy(Heads::all().layers(1..1)),
        policy(Heads::all().kv_heads([])),
        policy(Heads::all().kv_heads([128])),
        index(Heads::all().layers(2..)), // There are two: refused by the service.
        index(Heads::all().kv_heads([0, 2])),
    ] {
        let error = client.register_space(&params).unwrap_err();
        assert_eq!(error.status(), Status::Invalid, "{error}");
    }
    let fine = index(Heads::all().layers(1..=1).kv_heads([1]));
    client.register_space(&fine).unwrap().remove().unwrap();
}

#[test]
fn many_spaces_and_sequences_are_listed_whole() {
    let rig = Rig::new(1);
    let forks: Vec<Sequence> = (0..150).map(|_| rig.sequence.fork_all().unwrap()).collect();
    let listed = rig.client.sequences(Some(&rig.space)).unwrap();
    assert_eq!(listed.len(), 151);
    assert!(listed
        .windows(2)
        .all(|two| two[0].sequence < two[1].sequence));
    for sequence in forks.iter().chain([&rig.sequence]) {
        assert!(listed.iter().any(|info| info.sequence == sequence.id()));
    }
    assert!(listed
        .iter()
        .all(|info| info.space == rig.space.id() && info.n_tokens_max == 1));
    drop(forks);
    assert_eq!(rig.client.sequences(Some(&rig.space)).unwrap().len(), 1);
    assert!(!rig
        .client
        .sequences_of_all_clients(None)
        .unwrap()
        .is_empty());
}

#[test]
fn forks_share_what_they_have_in_common() {
    let mut rig = Rig::new(8);
    let fork = rig.sequence.fork(5).unwrap();
    let k = kv(1, 9);
    let step = Step::new(&rig.space, 0).item(Item::new(&fork).append(1));
    rig.queue.append(step.k(&k).v(&k)).unwrap();
    let mut back = vec![0.0f32; 6 * KV_HEADS * DIM];
    let read = Read::new(&fork, 0, 0..6).k(&mut back);
    rig.queue.read(read).unwrap();
    assert_eq!(back[..5 * KV_HEADS * DIM], rig.k[..5 * KV_HEADS * DIM]);
    assert_eq!(back[5 * KV_HEADS * DIM..], k);
    let parent = rig.sequence.info().unwrap();
    assert_eq!((parent.n_tokens_min, parent.n_tokens_max), (8, 8));
    assert!(parent.bytes_shared > 0);
    assert_eq!(rig.sequence.fork(9).unwrap_err().status(), Status::Invalid);
}

/// By BLAKE2b-256 of Python's hashlib.
#[test]
fn hashes_of_tokens_are_those_of_the_header() {
    let before = PrefixHash([7; 32]);
    let tokens: Vec<u32> = (0..150u32).map(|i| i.wrapping_mul(2_654_435_761)).collect();
    let hashes = PrefixHashes::new(before, &tokens);
    let text: Vec<_> = hashes.iter().map(|hash| format!("{hash:?}")).collect();
    assert_eq!(
        text,
        [
            "30b0be197d9a0ce9a7636434563c3a55cedb819d57bb9fb79bd1f62328d394e4",
            "e8061e4580cfdd8b475db71a0b0a2709e59468d9992fd613c494de9b623fb4f3",
        ]
    );
    assert_eq!((hashes.len(), hashes.n_tokens()), (2, 150));
    for n in [1, 7, 63, 64, 65, 100, 149] {
        let mut grown = PrefixHashes::new(before, &[]);
        for part in tokens.chunks(n) {
            grown.extend(part);
        }
        assert_eq!((&grown[..], grown.n_tokens()), (&hashes[..], 150), "{n}");
        let mut on = PrefixHashes::new(hashes[0], &tokens[64..n.max(64)]);
        on.extend(&tokens[n.max(64)..]);
        assert_eq!(on[..], hashes[1..]);
    }
    for (n_tokens, n) in [
        (0, 0),
        (63, 0),
        (64, 1),
        (127, 1),
        (128, 2),
        (usize::MAX, 2),
    ] {
        assert_eq!(hashes.up_to(n_tokens), &hashes[..n]);
    }
}

#[test]
fn what_was_published_is_found_by_its_tokens() {
    let mut fingerprint = [0; 32]; // A daemon has prefixes of other tests.
    let name = name("prefix");
    fingerprint[..name.len()].copy_from_slice(name.as_bytes());
    let mut rig = Rig::with(geometry().fingerprint(fingerprint), 200);
    let tokens: Vec<u32> = (0..200).collect();
    let seed = rig.space.prefix_seed(b"").unwrap();
    let error = rig.space.prefix_seed(&[0; 65]).unwrap_err();
    assert_eq!(error.status(), Status::Invalid);
    let hashes = PrefixHashes::new(seed, &tokens);
    assert_eq!(rig.space.find_prefix(&hashes).unwrap(), None);
    let (missed, n_found) = rig.space.fork_prefix(&hashes).unwrap();
    assert_eq!((missed.info().unwrap().n_tokens_max, n_found), (0, 0));

    let keep = Some(std::time::Duration::from_secs(600));
    let ours = rig.sequence.fork_all().unwrap();
    let prompt = ours.publish_prefix(&hashes, keep).unwrap();
    let again = rig.sequence.fork_all().unwrap();
    let id = again.id();
    let error = again.publish_prefix(&hashes, None).unwrap_err();
    assert_eq!(error.status(), Status::Exists, "{error}");
    let error = rig.client.own_sequence(id).free().unwrap_err();
    assert_eq!(error.status(), Status::Stale); // It was freed.
    for (hashes, keep) in [
        (&hashes[..0], None),
        (&hashes[..1], Some(std::time::Duration::ZERO)),
        (&[seed; 4][..], None), // More than it has.
        (&vec![seed; 65_537][..], None),
    ] {
        let fork = rig.sequence.fork_all().unwrap();
        let error = fork.publish_prefix(hashes, keep).unwrap_err();
        assert_eq!(error.status(), Status::Invalid, "{error}");
    }

    // Another client finds it where there is a daemon, and whoever has a prompt that begins alike.
    let other = if is_daemon() {
        open()
    } else {
        rig.client.clone()
    };
    let space = other.find_space(&rig.space.info().unwrap().name).unwrap();
    let mut queue = other.create_queue(&kvm::QueueParams::new()).unwrap();
    let alike = |n: u32| -> Vec<u32> { (0..n).chain([9; 100]).collect() };
    for (tokens, expected) in [(tokens.clone(), 192), (alike(150), 128), (alike(64), 64)] {
        let hashes = PrefixHashes::new(seed, &tokens);
        let found = space.find_prefix(&hashes).unwrap().unwrap();
        assert_eq!((found.sequence, found.n_tokens), (prompt, expected));
        // All of it is in memory, so nobody computes it sooner.
        let faster = space.find_prefix_faster_than(1e12, &hashes).unwrap();
        assert_eq!(faster, Some(found));
        let error = space.find_prefix_faster_than(-1.0, &hashes).unwrap_err();
        assert_eq!(error.status(), Status::Invalid, "{error}");
        let (chat, n_found) = space.fork_prefix(&hashes).unwrap();
        assert_eq!(n_found, expected);
        let (q, mut o) = (queries(1, 3), vec![0.0f32; Q_HEADS * DIM]);
        let step = Step::new(&space, 0).item(Item::new(&chat).query(1));
        queue.attend(step.q(&q).o(&mut o)).unwrap();
        let sees = |token| token < expected as usize;
        assert_close(&o, &oracle(&q, &rig.k, &rig.v, sees).0, 1e-5);
    }
    // A salt of one's own, and another beginning.
    let salted = space.prefix_seed(b"of another").unwrap();
    for hashes in [
        PrefixHashes::new(salted, &tokens),
        PrefixHashes::new(seed, &tokens[1..]),
        PrefixHashes::new(seed, &tokens[..63]),
    ] {
        assert_eq!(space.find_prefix(&hashes).unwrap(), None);
        assert_eq!(space.fork_prefix(&hashes).unwrap().1, 0);
    }
    // A space that means the same has prefixes of its own.
    let twin = geometry().fingerprint(fingerprint);
    let twin = other.register_space(&twin).unwrap();
    assert_eq!(twin.prefix_seed(b"").unwrap(), seed);
    assert_eq!(twin.find_prefix(&hashes).unwrap(), None);
    let (fork, n_found) = twin.fork_prefix(&hashes).unwrap();
    assert_eq!((fork.info().unwrap().space, n_found), (twin.id(), 0));

    rig.client.own_sequence(prompt).free().unwrap();
    assert_eq!(rig.space.find_prefix(&hashes).unwrap(), None);

    // By requests.
    let (first, second) = (rig.sequence.fork_all(), rig.sequence.fork_all());
    let (first, second) = (first.unwrap().into_id(), second.unwrap().into_id());
    rig.queue.scope(|scope| {
        let ticket = scope.publish_prefix(first, &hashes, keep).unwrap();
        scope.wait(ticket).unwrap().result.unwrap();
        let ticket = scope.publish_prefix(second, &hashes, keep).unwrap();
        let error = scope.wait(ticket).unwrap().result.unwrap_err();
        assert_eq!(error.status(), Status::Exists);
    });
    let found = rig.space.find_prefix(&hashes).unwrap().unwrap();
    assert_eq!(found.sequence, first);
    rig.client.own_sequence(first).free().unwrap();
    rig.client.own_sequence(second).truncate(3).unwrap();
}

#[test]
fn commits_and_truncations_move_the_ends() {
    let mut rig = Rig::new(0);
    let params = SequenceParams::new().reserve(100).manual_commit();
    let sequence = rig.space.create_sequence_with(&params).unwrap();
    let k = kv(8, 1);
    let item = Item::new(&sequence).append(4);
    let step = Step::new(&rig.space, 0).layers(LAYERS).item(item);
    rig.queue.append(step.k(&k).v(&k)).unwrap();
    let info = sequence.info().unwrap();
    assert!(info.is_manual_commit);
    assert_eq!((info.n_tokens_min, info.n_committed), (4, 0));
    sequence.commit(2).unwrap();
    assert_eq!(sequence.info().unwrap().n_committed, 2);
    sequence.truncate(3).unwrap();
    sequence.commit_all().unwrap();
    let info = sequence.info().unwrap();
    assert_eq!((info.n_tokens_max, info.n_committed), (3, 3));
    sequence.truncate(1000).unwrap();
    assert_eq!(sequence.info().unwrap().n_tokens_max, 3);
}

#[test]
fn a_dropped_sequence_is_freed_and_a_kept_id_is_not() {
    let rig = Rig::new(2);
    let id = rig.space.create_sequence().unwrap().id();
    let error = rig.client.own_sequence(id).info().unwrap_err();
    assert_eq!(error.status(), Status::Stale);
    let kept = rig.space.create_sequence().unwrap().into_id();
    let again = rig.client.own_sequence(kept);
    assert_eq!(again.info().unwrap().sequence, kept);
    again.free().unwrap();
    assert_eq!(
        rig.client.own_sequence(kept).free().unwrap_err().status(),
        Status::Stale
    );
}

#[test]
fn handles_outlive_the_client_that_made_them() {
    let Rig {
        mut queue,
        sequence,
        space,
        client,
        k,
        ..
    } = Rig::new(3);
    drop(client);
    let step = Step::new(&space, 0).item(Item::new(&sequence).append(3));
    queue.append(step.k(&k).v(&k)).unwrap();
    assert_eq!(sequence.info().unwrap().n_tokens_max, 6);
}

#[test]
fn reconnecting_needs_all_other_handles_gone() {
    let Rig {
        queue,
        sequence,
        space,
        mut client,
        ..
    } = Rig::new(1);
    for handle in [
        Box::new(queue) as Box<dyn std::any::Any>,
        Box::new(sequence),
        Box::new(space),
        Box::new(client.clone()),
    ] {
        assert_eq!(client.reconnect().unwrap_err().status(), Status::Busy);
        drop(handle);
    }
    client.reconnect().unwrap(); // Live: nothing happens.
    client.info().unwrap();
}

#[test]
fn a_child_can_only_forget() {
    extern "C" {
        fn fork() -> i32;
        fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
        fn _exit(status: i32) -> !;
    }
    let rig = Rig::new(1);
    // SAFETY: the child calls functions of kvm that look at a page and return, and ends.
    unsafe {
        let child = fork();
        if child == 0 {
            let forked = |status: Status| status == Status::Forked;
            let all = rig
                .client
                .info()
                .err()
                .map_or(false, |error| forked(error.status()))
                && rig
                    .sequence
                    .info()
                    .err()
                    .map_or(false, |error| forked(error.status()));
            drop(rig.sequence);
            _exit(if all { 42 } else { 1 });
        }
        let mut status = 0;
        assert_eq!(waitpid(child, &mut status, 0), child);
        assert_eq!(status >> 8, 42);
    }
    assert_eq!(rig.sequence.info().unwrap().n_tokens_max, 1);
}

/// The header's thread rules, as the compiler sees them.
#[test]
fn handles_are_send_and_sync_as_the_header_allows() {
    fn is_send_and_sync<T: Send + Sync>() {}
    fn is_send<T: Send>() {}
    is_send_and_sync::<Client>();
    is_send_and_sync::<Space>();
    is_send_and_sync::<Sequence>();
    is_send_and_sync::<kvm::Arena>();
    is_send_and_sync::<ArenaBuffer<f32>>();
    is_send_and_sync::<SpaceParams>();
    is_send_and_sync::<Step<'static>>();
    is_send_and_sync::<kvm::Error>();
    is_send::<Queue>(); // Not Sync: the example of Queue shows it.
    is_send::<Completion<'static>>();
}

#[test]
fn threads_share_a_client_and_have_queues_of_their_own() {
    let client = open();
    let space = client.register_space(&geometry()).unwrap();
    std::thread::scope(|threads| {
        for seed in 0..4 {
            let (client, space) = (&client, &space);
            threads.spawn(move || {
                let mut queue = client.create_queue(&kvm::QueueParams::new()).unwrap();
                let sequence = space.create_sequence().unwrap();
                let (k, v, q) = (kv(20, seed), kv(20, seed + 100), queries(1, seed + 200));
                let mut o = vec![0.0f32; Q_HEADS * DIM];
                for token in 0..20 {
                    let row = token * KV_HEADS * DIM..(token + 1) * KV_HEADS * DIM;
                    let item = Item::new(&sequence).append(1).query(1);
                    let step = Step::new(space, 0).item(item).q(&q).o(&mut o);
                    queue.step(step.k(&k[row.clone()]).v(&v[row])).unwrap();
                }
                assert_close(&o, &oracle(&q, &k, &v, |_| true).0, 1e-5);
            });
        }
    });
}
