// SPDX-License-Identifier: Apache-2.0
//! Compares what comes back from requests that wait with attention computed here.

mod common;

use std::time::Duration;

use common::*;
use kvm::{
    Accuracy, Bf16, Codec, CodecId, HeadProbe, Heads, Index, IndexKind, Item, LayerKind,
    LayerParams, Merge, Mode,
};
use kvm::{ModeUsed, Observe, Policy, Proposal, QueueParams, Read, Source, SpaceParams, Status};
use kvm::{Step, F16};

const CLOSE: f64 = 1e-5;

#[test]
fn a_decode_step_appends_and_attends() {
    let mut rig = Rig::new(0);
    let (k, v) = (kv(5, 3), kv(5, 4));
    for token in 0..5 {
        let row = token * KV_HEADS * DIM..(token + 1) * KV_HEADS * DIM;
        let q = queries(1, 10 + token as u32);
        let (mut o, mut lse) = ([0.0f32; Q_HEADS * DIM], [0.0f32; Q_HEADS]);
        let step = Step::new(&rig.space, 1)
            .item(Item::new(&rig.sequence).append(1).query(1))
            .k(&k[row.clone()])
            .v(&v[row])
            .q(&q)
            .o(&mut o)
            .lse(&mut lse);
        let stats = rig.queue.step(step).unwrap();
        let (expected_o, expected_lse) = oracle(&q, &k, &v, |t| t <= token);
        assert_close(&o, &expected_o, CLOSE);
        assert_close(&lse, &expected_lse, CLOSE);
        assert_eq!(stats.mode, ModeUsed::Exact);
        assert_eq!(stats.keys_read, (KV_HEADS * (token + 1)) as u64);
        assert!(stats.service_time >= stats.compute_time);
    }
    let info = rig.sequence.info().unwrap();
    assert_eq!((info.n_tokens_min, info.n_tokens_max), (0, 5));
}

#[test]
fn rows_that_are_not_finite_are_counted() {
    let mut rig = Rig::new(8);
    let mut q = queries(1, 10);
    q[DIM] = f32::NAN; // of q head 1
    for n in [1, 0] {
        let (mut o, mut lse) = ([0.0f32; Q_HEADS * DIM], [0.0f32; Q_HEADS]);
        let step = Step::new(&rig.space, 0)
            .item(Item::new(&rig.sequence).query(1))
            .q(&q)
            .o(&mut o)
            .lse(&mut lse);
        let stats = rig.queue.attend(step).unwrap();
        assert_eq!(stats.n_not_finite, n);
        assert_eq!(lse.iter().filter(|x| x.is_nan()).count() as u64, n);
        q[DIM] = 1.0;
    }
}

#[test]
fn rows_of_a_prefill_are_causal_unless_asked_otherwise() {
    let mut rig = Rig::new(6);
    let q = queries(3, 20);
    let item = Item::new(&rig.sequence).query(3);
    let (causal, _) = rig.ask(item.clone(), &q).unwrap();
    let (everything, _) = rig.ask(item.not_causal(), &q).unwrap();
    for row in 0..3 {
        let part = row * Q_HEADS * DIM..(row + 1) * Q_HEADS * DIM;
        let (expected, _) = oracle(&q[part.clone()], &rig.k, &rig.v, |t| t <= 3 + row);
        assert_close(&causal[part.clone()], &expected, CLOSE);
        let (expected, _) = oracle(&q[part.clone()], &rig.k, &rig.v, |_| true);
        assert_close(&everything[part], &expected, CLOSE);
    }
}

/// Attention of one row of one q head over rows of keys and values, each with a bias: o and lse.
fn plain(q: &[f32], k: &[&[f32]], v: &[&[f32]], bias: impl Fn(usize) -> f64) -> (Vec<f64>, f64) {
    let mut o = vec![0.0; v[0].len()];
    let mut sum = 0.0;
    for (token, (k, v)) in k.iter().zip(v).enumerate() {
        let dot: f64 = q
            .iter()
            .zip(*k)
            .map(|(q, k)| f64::from(*q) * f64::from(*k))
            .sum();
        let weight = (dot / (q.len() as f64).sqrt() + bias(token)).exp();
        sum += weight;
        for (o, v) in o.iter_mut().zip(*v) {
            *o += weight * f64::from(*v);
        }
    }
    (o.iter().map(|x| x / sum).collect(), sum.ln())
}

/// Of each row of `width` numbers the `dim` from `at` on.
fn parts_of(rows: &[f32], width: usize, at: usize, dim: usize) -> Vec<&[f32]> {
    rows.chunks(width).map(|row| &row[at..at + dim]).collect()
}

/// With a large group, biases by position, and a layer of other dims.
#[test]
fn values_that_are_in_keys_are_not_appended() {
    const TOKENS: usize = 70;
    const HEADS: usize = 40; // of one kv head
    let slopes: Vec<f32> = (0..HEADS).map(|head| 0.01 * head as f32).collect();
    let client = open();
    let params = SpaceParams::new(name("latent"), 2, HEADS as u32, 24)
        .kv_heads(1)
        .values_in_keys(16)
        .stored_as(CodecId::F32)
        .alibi_slopes(&slopes)
        .layer(LayerParams::new(1..2).head_dims(32, 8));
    let space = client.register_space(&params).unwrap();
    assert!(space.info().unwrap().has_values_in_keys);
    let mut queue = client.create_queue(&QueueParams::new()).unwrap();
    let sequence = space.create_sequence().unwrap();
    for (layer, dim_k, dim_v) in [(0, 24, 16), (1, 32, 8)] {
        let (k, q) = (numbers(TOKENS * dim_k, 1), numbers(HEADS * dim_k, 2));
        let (mut o, mut lse) = (vec![0.0f32; HEADS * dim_v], vec![0.0f32; HEADS]);
        let item = || Item::new(&sequence).append(TOKENS as u32).query(1);
        let step = Step::new(&space, layer).item(item()).k(&k).q(&q);
        queue.step(step.o(&mut o).lse(&mut lse)).unwrap();
        let keys = parts_of(&k, dim_k, 0, dim_k);
        let values = parts_of(&k, dim_k, 0, dim_v);
        for head in 0..HEADS {
            let slope = f64::from(slopes[head]);
            let q = &q[head * dim_k..][..dim_k];
            let (expected_o, expected_lse) =
                plain(q, &keys, &values, |t| slope * (t as f64 - 69.0));
            assert_close(&o[head * dim_v..][..dim_v], &expected_o, CLOSE);
            assert_close(&lse[head..=head], &[expected_lse], CLOSE);
        }
        let (mut back_k, mut back_v) = (vec![0.0f32; 8 * dim_k], vec![0.0f32; 8 * dim_v]);
        let read = Read::new(&sequence, layer, 60..68);
        queue.read(read.k(&mut back_k).v(&mut back_v)).unwrap();
        assert_eq!(back_k, keys[60..68].concat());
        assert_eq!(back_v, values[60..68].concat());

        let step = Step::new(&space, layer).item(item()).k(&k).v(&k).q(&q);
        let error = queue.step(step.o(&mut o)).unwrap_err();
        assert_eq!(error.status(), Status::Invalid);
        assert!(error.message().contains("KVM_SPACE_V_IN_K"), "{error}");
    }
    assert_eq!(sequence.info().unwrap().n_tokens_min, TOKENS as u64);
    // Without a query too.
    let k = numbers(24, 3);
    let step = Step::new(&space, 0).item(Item::new(&sequence).append(1));
    queue.append(step.k(&k)).unwrap();
    assert_eq!(sequence.info().unwrap().n_tokens_max, TOKENS as u64 + 1);

    let index = Index::new(Heads::all(), IndexKind::Sketch);
    let error = client.register_space(&params.index(index)).unwrap_err();
    assert_eq!(error.status(), Status::Unsupported, "{error}");
}

#[test]
fn slopes_are_biases_by_distance() {
    const TOKENS: usize = 100;
    let slopes = [0.5, 0.125, -0.25, 0.0];
    let mut rig = Rig::with(geometry().alibi_slopes(&slopes), TOKENS);
    let q = queries(1, 140);
    for position in [TOKENS - 1, 40] {
        let item = Item::new(&rig.sequence).query(1);
        let item = item.query_position(position as u64);
        let (o, lse) = rig.ask(item, &q).unwrap();
        for (head, slope) in slopes.into_iter().enumerate() {
            let at = head / (Q_HEADS / KV_HEADS) * DIM;
            let seen = (position + 1) * KV_HEADS * DIM;
            let k = parts_of(&rig.k[..seen], KV_HEADS * DIM, at, DIM);
            let v = parts_of(&rig.v[..seen], KV_HEADS * DIM, at, DIM);
            let part = head * DIM..(head + 1) * DIM;
            let (expected_o, expected_lse) = plain(&q[part.clone()], &k, &v, |t| {
                f64::from(slope) * (t as f64 - position as f64)
            });
            assert_close(&o[part], &expected_o, CLOSE);
            assert_close(&lse[head..=head], &[expected_lse], CLOSE);
        }
    }
}

#[test]
fn layers_have_dims_of_their_own() {
    const TOKENS: usize = 5;
    let client = open();
    let params = SpaceParams::new(name("dims"), 3, 1, 16)
        .stored_as(CodecId::F32)
        .layer(LayerParams::new(1..2).head_dims(32, 8))
        .layer(LayerParams::new(2..3).kind(LayerKind::Alias { target: 1 }));
    let space = client.register_space(&params).unwrap();
    let mut queue = client.create_queue(&QueueParams::new()).unwrap();
    let sequence = space.create_sequence().unwrap();
    let (k, v) = (numbers(TOKENS * 32, 150), numbers(TOKENS * 16, 151));
    let append = |layer| {
        let item = Item::new(&sequence).append(TOKENS as u32);
        Step::new(&space, layer).item(item).k(&k).v(&v)
    };
    let error = queue.append(append(0).layers(2)).unwrap_err();
    assert_eq!(error.status(), Status::Invalid);
    assert!(error.message().contains("dims"), "{error}");
    queue.append(append(0)).unwrap();
    queue.append(append(1)).unwrap();
    for (layer, dim_k, dim_v) in [(0, 16, 16), (1, 32, 8), (2, 32, 8)] {
        let q = numbers(dim_k, 152);
        let mut o = vec![0.0f32; dim_v];
        let step = Step::new(&space, layer).item(Item::new(&sequence).query(1));
        queue.attend(step.q(&q).o(&mut o)).unwrap();
        let k = parts_of(&k[..TOKENS * dim_k], dim_k, 0, dim_k);
        let v = parts_of(&v[..TOKENS * dim_v], dim_v, 0, dim_v);
        assert_close(&o, &plain(&q, &k, &v, |_| 0.0).0, CLOSE);
    }
}

#[test]
fn positions_ranges_and_trees_restrict_what_is_seen() {
    let mut rig = Rig::new(10);
    let q = queries(1, 30);
    let (k, v) = (rig.k.clone(), rig.v.clone());
    let sequence = rig.sequence.id();
    let mut check = |item: Item, sees: &dyn Fn(usize) -> bool| {
        let (o, lse) = rig.ask(item, &q).unwrap();
        let (expected_o, expected_lse) = oracle(&q, &k, &v, sees);
        assert_close(&o, &expected_o, CLOSE);
        assert_close(&lse, &expected_lse, CLOSE);
    };
    let row = || Item::new(sequence).query(1);
    check(row().query_position(4), &|t| t <= 4);
    check(row().only(1..3).only(7..9), &|t| [1, 2, 7, 8].contains(&t));
    check(row().exclude(1..3).exclude(7..9), &|t| {
        ![1, 2, 7, 8].contains(&t)
    });
    check(row().only(8..8), &|_| false); // Sees nothing: o = 0, lse = -inf.

    check(row().only(1..3).exclude(4..6), &|t| ![4, 5].contains(&t));

    // Two drafts of a token at position 8, which row 1 is the sibling of.
    let q = queries(2, 31);
    let item = Item::new(sequence).query(2).tree([0b01, 0b10]);
    let (o, _) = rig.ask(item, &q).unwrap();
    let (expected, _) = oracle(&q[Q_HEADS * DIM..], &k, &v, |t| t != 8);
    assert_close(&o[Q_HEADS * DIM..], &expected, CLOSE);

    let wrong = Item::new(sequence).query(2).tree([0b01]);
    assert_eq!(rig.ask(wrong, &q).unwrap_err().status(), Status::Invalid);
}

#[test]
fn a_request_serves_many_sequences() {
    let mut rig = Rig::new(4);
    let other = rig.sequence.fork(2).unwrap();
    let (k, v, q) = (kv(2, 40), kv(2, 41), queries(2, 42));
    let mut o = vec![0.0f32; 2 * Q_HEADS * DIM];
    let items = [&rig.sequence, &other].into_iter().zip(0..);
    let items = items.map(|(sequence, row)| {
        let item = Item::new(sequence).append(1).append_row(row);
        item.query(1).query_row(row).only(0..2).only(2..100)
    });
    let step = Step::new(&rig.space, 0).items(items);
    rig.queue.step(step.k(&k).v(&v).q(&q).o(&mut o)).unwrap();
    for (row, n_before) in [4, 2].into_iter().enumerate() {
        let rows = |all: &[f32], new: &[f32]| {
            let width = KV_HEADS * DIM;
            [&all[..n_before * width], &new[row * width..][..width]].concat()
        };
        let part = row * Q_HEADS * DIM..(row + 1) * Q_HEADS * DIM;
        let (keys, values) = (rows(&rig.k, &k), rows(&rig.v, &v));
        let (expected, _) = oracle(&q[part.clone()], &keys, &values, |_| true);
        assert_close(&o[part], &expected, CLOSE);
    }
}

#[test]
fn strides_and_types_are_those_of_the_slices() {
    let mut rig = Rig::new(0);
    // K and V of a token side by side, as bf16: [token][k, v][head][dim].
    let both: Vec<Bf16> = numbers(3 * 2 * KV_HEADS * DIM, 50)
        .into_iter()
        .map(Bf16::from_f32)
        .collect();
    let (row, head) = ((2 * KV_HEADS * DIM) as u64, DIM as u64);
    let k = Source::from(&both[..both.len() - KV_HEADS * DIM]).strides(0, row, head);
    let v = Source::from(&both[KV_HEADS * DIM..]).strides(0, row, head);
    let item = Item::new(&rig.sequence).append(3);
    let step = Step::new(&rig.space, 0).item(item).k(k).v(v);
    rig.queue.append(step).unwrap();

    let (mut k, mut v) = (
        vec![0.0f32; 3 * KV_HEADS * DIM],
        vec![Bf16(0); 2 * KV_HEADS * DIM],
    );
    rig.queue
        .read(Read::new(&rig.sequence, 0, 0..3).k(&mut k))
        .unwrap();
    rig.queue
        .read(Read::new(&rig.sequence, 0, 1..3).v(&mut v))
        .unwrap();
    for token in 0..3 {
        for i in 0..KV_HEADS * DIM {
            let at = token * 2 * KV_HEADS * DIM + i;
            assert_eq!(k[token * KV_HEADS * DIM + i], both[at].to_f32());
            if token > 0 {
                assert_eq!(
                    v[(token - 1) * KV_HEADS * DIM + i],
                    both[at + KV_HEADS * DIM]
                );
            }
        }
    }
}

#[test]
fn arena_buffers_are_read_and_written_in_place() {
    let mut rig = Rig::new(7);
    let arena = rig.client.create_arena(1 << 20).unwrap();
    let row = Q_HEADS * DIM;
    let mut q = arena.alloc::<f32>(2 * row).unwrap();
    let mut o = arena.alloc::<f32>(2 * row).unwrap();
    let mut lse = arena.alloc::<f32>(Q_HEADS).unwrap();
    assert!(q.iter().chain(o.iter()).all(|x| *x == 0.0));
    q[row..].copy_from_slice(&queries(1, 60));
    let step = Step::new(&rig.space, 0)
        .item(Item::new(&rig.sequence).query(1))
        .q(q.source(row..))
        .o(o.sink(row..2 * row))
        .lse(&mut lse);
    rig.queue.attend(step).unwrap();
    let (expected_o, expected_lse) = oracle(&q[row..], &rig.k, &rig.v, |_| true);
    assert!(o[..row].iter().all(|x| *x == 0.0));
    assert_close(&o[row..], &expected_o, CLOSE);
    assert_close(&lse, &expected_lse, CLOSE);

    // Buffers go back: the arena would not have room for all of these at once.
    drop((q, o, lse));
    for _ in 0..10 {
        arena.alloc::<F16>(200 << 10).unwrap();
    }
    assert_eq!(arena.alloc::<f32>(0).unwrap_err().status(), Status::Invalid);
    let huge = arena.alloc::<f32>(usize::MAX).unwrap_err();
    assert_eq!(huge.status(), Status::NoSpace);
    // The memory that a buffer needs outlives the handles it was made with.
    let buffer = arena.alloc::<f32>(16).unwrap();
    drop((arena, rig));
    assert_eq!(buffer.len(), 16);
}

/// Arenas are numbered by client: the number of one means another arena, or none, to another.
#[test]
fn an_arena_of_another_client_is_refused() {
    let mut rig = Rig::new(2);
    let _mine = rig.client.create_arena(1 << 16).unwrap();
    let other = open();
    let arena = other.create_arena(1 << 16).unwrap();
    let q = arena.alloc::<f32>(Q_HEADS * DIM).unwrap();
    let mut o = arena.alloc::<f32>(Q_HEADS * DIM).unwrap();
    let mut here = [0.0f32; Q_HEADS * DIM];
    let item = Item::new(&rig.sequence).query(1);
    let step = Step::new(&rig.space, 0).item(item.clone()).q(&q);
    let error = rig.queue.attend(step.o(&mut here)).unwrap_err();
    assert_eq!(error.status(), Status::Invalid, "{error}");
    let step = Step::new(&rig.space, 0).item(item).q(&here);
    assert!(rig.queue.attend(step.o(&mut o)).is_err());
    let read = Read::new(&rig.sequence, 0, 0..2).k(&mut o);
    assert!(rig.queue.read(read).is_err());
    let step = Step::new(&rig.space, 0).item(Item::new(&rig.sequence).query(1));
    rig.queue.scope(|scope| {
        let refused = scope.attend(step.q(&q).o(&mut o)).unwrap_err();
        assert_eq!(refused.error.status(), Status::Invalid);
        assert_eq!(scope.outstanding(), 0);
    });
}

#[test]
fn merged_parts_are_the_whole() {
    let mut rig = Rig::new(9);
    let q = queries(1, 70);
    let item = Item::new(&rig.sequence).query(1);
    let (o_a, lse_a) = rig.ask(item.clone().only(0..5), &q).unwrap();
    let (o_b, lse_b) = rig.ask(item.exclude(0..5), &q).unwrap();
    let (mut o, mut lse) = (vec![0.0f32; Q_HEADS * DIM], vec![0.0f32; Q_HEADS]);
    let merge = Merge::new(1, Q_HEADS as u32, DIM as u32).state(&o_a, &lse_a);
    merge.state(&o_b, &lse_b).write(&mut o, &mut lse).unwrap();
    let (expected_o, expected_lse) = oracle(&q, &rig.k, &rig.v, |_| true);
    assert_close(&o, &expected_o, CLOSE);
    assert_close(&lse, &expected_lse, CLOSE);

    let short = Merge::new(2, Q_HEADS as u32, DIM as u32).state(&o_a, &lse_a);
    let error = short.write(&mut o, &mut lse).unwrap_err();
    assert_eq!(error.status(), Status::Invalid);
}

#[test]
fn layers_heads_and_codecs_are_as_registered() {
    let params = geometry()
        .layer(LayerParams::new(0..1).window(3))
        .codec(Codec::new(Heads::all().kv_heads([1])).values(CodecId::BF16));
    let mut rig = Rig::with(params, 8);
    let q = queries(1, 80);
    let (o, _) = rig.ask(Item::new(&rig.sequence).query(1), &q).unwrap();
    let (expected, _) = oracle(&q, &rig.k, &rig.v, |t| t >= 5);
    let half = Q_HEADS / 2 * DIM;
    assert_close(&o[..half], &expected[..half], CLOSE);
    assert_close(&o[half..], &expected[half..], 0.01); // Values of the second head are bf16.
    let differs = (half..2 * half).any(|i| (f64::from(o[i]) - expected[i]).abs() > CLOSE);
    assert!(differs, "the codec of the second head was not used");
}

#[test]
fn codecs_have_names() {
    let codec = CodecId::find("int8_channel").unwrap();
    assert_eq!(codec.name(), Some("int8_channel"));
    assert_eq!(CodecId::I8.name(), Some("int8"));
    assert_eq!(CodecId::find("int9"), None);
    assert_eq!(CodecId::find("in\0t8"), None);
    let mut rig = Rig::with(geometry().stored_as(codec), 80);
    assert_eq!(rig.space.info().unwrap().codec, codec);
    let q = queries(1, 80);
    let (o, _) = rig.ask(Item::new(&rig.sequence).query(1), &q).unwrap();
    let (expected, _) = oracle(&q, &rig.k, &rig.v, |_| true);
    assert_close(&o, &expected, 0.02);
}

#[test]
fn sinks_and_recent_tokens_are_what_a_policy_leaves() {
    let policy = Policy::sinks_recent(Heads::all().layers(..1), 2, 4);
    let mut rig = Rig::with(geometry().policy(policy), 600);
    let q = queries(1, 90);
    let (o, _) = rig.ask(Item::new(&rig.sequence).query(1), &q).unwrap();
    let (expected, _) = oracle(&q, &rig.k, &rig.v, |t| !(2..596).contains(&t));
    assert_close(&o, &expected, CLOSE);
    let info = rig.sequence.info().unwrap();
    assert!(info.n_entries_dropped > 0);
    let error = rig.sequence.truncate(300).unwrap_err();
    assert_eq!(error.status(), Status::Partial);
}

#[test]
fn approximate_modes_read_less_and_say_how_good_they_are() {
    let index = Index::new(Heads::all(), IndexKind::Sketch).min_tokens(256);
    let mut rig = Rig::with(geometry().index(index), 0);
    // Values around 1: of values around 0 the mean is as small as the error of a sample.
    rig.k = kv(2048, 101);
    rig.v = kv(2048, 102).iter().map(|x| x + 1.0).collect();
    let item = Item::new(&rig.sequence).append(2048);
    let step = Step::new(&rig.space, 0).item(item).k(&rig.k).v(&rig.v);
    rig.queue.append(step).unwrap();
    let q = queries(1, 100);
    let (exact, _) = rig.ask(Item::new(&rig.sequence).query(1), &q).unwrap();
    let mut ask = |mode: Mode| {
        let (mut o, mut err) = (vec![0.0f32; Q_HEADS * DIM], vec![0.0f32; Q_HEADS * 2]);
        let step = Step::new(&rig.space, 0)
            .item(Item::new(&rig.sequence).query(1))
            .mode(mode)
            .proposal(Proposal::Sketch)
            .seed(3);
        let stats = rig.queue.attend(step.q(&q).o(&mut o).err(&mut err));
        stats.map(|stats| (stats, o, err))
    };
    let (stats, _, err) = ask(Mode::TopK { budget: 32 }).unwrap();
    assert_eq!(stats.mode, ModeUsed::TopK);
    assert!(stats.keys_read < stats.keys_present / 2, "{stats:?}");
    assert!(err.iter().all(|e| e.is_nan()) && stats.err_max.is_nan());

    let accuracy = Accuracy {
        eps: 0.3,
        delta: 0.001,
    };
    for mode in [
        Mode::Sampled {
            budget: 512,
            accuracy,
        },
        Mode::Verified {
            budget: 0,
            accuracy,
        },
    ] {
        let (stats, o, err) = ask(mode).unwrap();
        for head in 0..Q_HEADS {
            let part = head * DIM..(head + 1) * DIM;
            let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| x * x).sum::<f32>().sqrt();
            let difference = norm(&mut part.clone().map(|i| o[i] - exact[i]));
            let error = difference / norm(&mut exact[part].iter().copied());
            assert!(error <= err[2 * head] + 1e-3, "{mode:?}: {error}, {err:?}");
            assert!(err[2 * head] <= stats.err_max, "{err:?}, {stats:?}");
        }
    }
    // Whatever is fastest: on so short a context that may be exact.
    for time in [None, Some(Duration::ZERO), Some(Duration::MAX)] {
        let (stats, o, _) = ask(Mode::Auto { time, accuracy }).unwrap();
        assert!(
            matches!(
                stats.mode,
                ModeUsed::Exact | ModeUsed::Sampled | ModeUsed::Verified
            ),
            "{stats:?}"
        );
        if time == Some(Duration::MAX) {
            assert_eq!(stats.mode, ModeUsed::Exact);
            assert_eq!(o, exact);
        }
    }
    let without_budget = ask(Mode::TopK { budget: 0 }).unwrap_err();
    assert_eq!(without_budget.status(), Status::Invalid);
    let index_bytes = rig.sequence.info().unwrap().bytes_index;
    assert!(index_bytes > 0);
}

#[test]
fn a_space_says_the_mode_of_steps_that_do_not() {
    let index = Index::new(Heads::all(), IndexKind::Sketch).min_tokens(256);
    let sampled = |budget, eps| Mode::Sampled {
        budget,
        accuracy: Accuracy { eps, delta: 0.1 },
    };
    let params = geometry().index(index).default_mode(sampled(64, 0.0));
    let mut rig = Rig::with(params.default_proposal(Proposal::Sketch), 2048);
    let info = rig.space.info().unwrap();
    assert_eq!(info.default_mode, Some(sampled(64, 0.0)));
    assert_eq!(info.default_proposal, Some(Proposal::Sketch));
    let q = queries(1, 130);
    let mut ask = |mode: Option<Mode>| {
        let (mut o, mut err) = (vec![0.0f32; Q_HEADS * DIM], vec![0.0f32; Q_HEADS * 2]);
        let step = Step::new(&rig.space, 0).item(Item::new(&rig.sequence).query(1));
        let step = mode.into_iter().fold(step, Step::mode);
        let stats = rig.queue.attend(step.q(&q).o(&mut o).err(&mut err));
        stats.map(|stats| (stats.mode, stats.keys_read, o, err))
    };
    let got = ask(None).unwrap();
    assert_eq!(got.0, ModeUsed::Sampled);
    assert_eq!(got, ask(Some(sampled(64, 0.0))).unwrap());
    assert_eq!(ask(Some(Mode::Exact)).unwrap().0, ModeUsed::Exact);
    let own = |budget, eps| {
        let accuracy = Accuracy { eps, delta: 0.0 };
        Some(Mode::OfSpace { budget, accuracy })
    };
    assert_eq!(
        ask(own(256, 0.0)).unwrap(),
        ask(Some(sampled(256, 0.0))).unwrap()
    );
    assert_eq!(
        ask(own(0, 0.3)).unwrap(),
        ask(Some(sampled(0, 0.3))).unwrap()
    );
    assert_eq!(ask(own(0, 1.5)).unwrap_err().status(), Status::Invalid);

    let wrong = geometry().default_mode(Mode::TopK { budget: 0 });
    let error = open().register_space(&wrong).unwrap_err();
    assert_eq!(error.status(), Status::Invalid);
    assert!(error.message().contains("default_budget is 0"), "{error}");
}

#[test]
fn what_a_prefill_saw_is_kept_and_checked() {
    let mut rig = Rig::new(5);
    let (q, sums) = (queries(2, 110), numbers(5 * KV_HEADS, 111));
    let sums: Vec<f32> = sums.iter().map(|x| x.abs()).collect();
    let observe = Observe::new(&rig.sequence, 0).queries(3, 2, &q);
    rig.queue.observe(observe.column_sums(0, 5, &sums)).unwrap();
    assert_eq!(rig.sequence.info().unwrap().n_rows_observed, 2);
    assert_eq!(
        rig.sequence
            .fork_all()
            .unwrap()
            .info()
            .unwrap()
            .n_rows_observed,
        2
    );
    let beyond = Observe::new(&rig.sequence, 0).column_sums(1, 5, &sums);
    assert_eq!(
        rig.queue.observe(beyond).unwrap_err().status(),
        Status::Invalid
    );
}

#[test]
fn failures_have_their_status_and_leave_outputs_alone() {
    let mut rig = Rig::new(4);
    let (k, q) = (kv(1, 120), queries(1, 121));
    let hole = Item::new(&rig.sequence).append(1).append_position(9);
    let step = Step::new(&rig.space, 0).item(hole).k(&k).v(&k);
    assert_eq!(rig.queue.append(step).unwrap_err().status(), Status::Hole);

    let mut o = vec![7.0f32; Q_HEADS * DIM];
    let gone = rig.space.create_sequence().unwrap().into_id();
    rig.client.own_sequence(gone).free().unwrap();
    let step = Step::new(&rig.space, 0).item(Item::new(gone).query(1));
    let error = rig.queue.attend(step.q(&q).o(&mut o)).unwrap_err();
    assert_eq!(error.status(), Status::Stale, "{error}");
    // A row is missing in q.
    let step = Step::new(&rig.space, 0).item(Item::new(&rig.sequence).query(2));
    let error = rig.queue.attend(step.q(&q).o(&mut o)).unwrap_err();
    assert_eq!(error.status(), Status::Invalid, "{error}");
    assert!(!error.message().is_empty());
    // Nothing at all.
    let error = rig.queue.attend(Step::new(&rig.space, 0)).unwrap_err();
    assert_eq!(error.status(), Status::Invalid);
    assert!(o.iter().all(|x| *x == 7.0));

    let late = Step::new(&rig.space, 0).item(Item::new(&rig.sequence).query(1));
    let late = late.deadline_in(std::time::Duration::ZERO).q(&q).o(&mut o);
    assert_eq!(
        rig.queue.attend(late).unwrap_err().status(),
        Status::Deadline
    );
    let in_time = Step::new(&rig.space, 0).item(Item::new(&rig.sequence).query(1));
    let in_time = in_time.deadline_in(std::time::Duration::from_secs(3600));
    rig.queue.attend(in_time.q(&q).o(&mut o)).unwrap();

    let params = QueueParams::new().entries(100_000);
    let error = rig.client.create_queue(&params).unwrap_err();
    assert_eq!(error.status(), Status::Invalid);
}

// Head 0 gives its attention to earlier copies of its token, head 1 to what followed them.
#[test]
fn the_probe_finds_heads_that_look_back() {
    const PERIOD: usize = 24;
    const TOKENS: usize = 1 + 3 * PERIOD;
    let words = numbers((PERIOD + 1) * 64, 130);
    let word = |token: usize| {
        let at = if token == 0 {
            PERIOD
        } else {
            (token - 1) % PERIOD
        };
        &words[at * 64..(at + 1) * 64]
    };
    let (mut q, mut k) = (Vec::new(), Vec::new());
    let noise = numbers(TOKENS * 64, 131);
    for token in 0..TOKENS {
        for head in 0..3 {
            let own = &noise[token * 64..(token + 1) * 64];
            let before = word(token.max(1) - 1);
            let said = [word(token), before, own][head];
            k.extend_from_slice(said);
            let asked = if head == 2 { own } else { word(token) };
            q.extend(asked.iter().map(|x| 4.0 * x));
        }
    }
    let probe = HeadProbe::new(PERIOD as u32, 3, 3, 64).prefix(1);
    let scores = probe.scores(&q, &k).unwrap();
    assert_eq!(scores.len(), 3);
    assert!(
        scores[0].echo > 0.3 && scores[0].induction < 0.2,
        "{scores:?}"
    );
    assert!(
        scores[1].induction > 0.3 && scores[1].echo < 0.2,
        "{scores:?}"
    );
    assert!(scores[2].induction < 0.2, "{scores:?}");
    let few = probe.clone().rows(5).scale(0.125).scores(&q, &k).unwrap();
    assert!(few[0].echo > 0.3, "{few:?}");
    let short = probe.scores(&q[..64], &k).unwrap_err();
    assert_eq!(short.status(), Status::Invalid);
    let uneven = probe.kv_heads(2).scores(&q, &k).unwrap_err();
    assert_eq!(uneven.status(), Status::Invalid);
}
