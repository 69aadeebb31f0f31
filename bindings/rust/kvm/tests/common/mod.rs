// SPDX-License-Identifier: Apache-2.0
//! The tests share this. They run over the daemon at $KVM_SOCKET when that is set, else over an
//! engine in this process (feature `embedded`). Expected numbers come from attention in f64, here.
#![allow(dead_code)] // Each test uses a part.

use std::sync::atomic::{AtomicU32, Ordering};

use kvm::{Client, CodecId, ConnectParams, EmbeddedParams, Item, Queue, QueueParams, Result};
use kvm::{Sequence, Space, SpaceParams, Step};

pub const LAYERS: u32 = 2;
pub const Q_HEADS: usize = 4;
pub const KV_HEADS: usize = 2;
pub const DIM: usize = 16;

pub fn is_daemon() -> bool {
    std::env::var_os("KVM_SOCKET").is_some()
}

pub fn open() -> Client {
    let client = if is_daemon() {
        Client::connect(&ConnectParams::new().client_name("rust-test"))
    } else {
        let params = EmbeddedParams::new()
            .threads(2)
            .host_capacity_bytes(256 << 20);
        Client::open_embedded(&params)
    };
    client.expect("KVM_SOCKET names a daemon, or the feature `embedded` is on")
}

/// A name that no other test of the daemon has.
pub fn name(stem: &str) -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("{stem}-{}-{next}", std::process::id())
}

pub fn geometry() -> SpaceParams {
    SpaceParams::new(name("rust"), LAYERS, Q_HEADS as u32, DIM as u32)
        .kv_heads(KV_HEADS as u32)
        .stored_as(CodecId::F32)
}

/// Numbers in [-1, 1) that are the same every time.
pub fn numbers(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    (0..n)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

pub fn kv(n_tokens: usize, seed: u32) -> Vec<f32> {
    numbers(n_tokens * KV_HEADS * DIM, seed)
}

pub fn queries(n_rows: usize, seed: u32) -> Vec<f32> {
    numbers(n_rows * Q_HEADS * DIM, seed)
}

/// Attention of one query row `[Q_HEADS][DIM]` over the tokens that `sees` admits: o and lse.
pub fn oracle(
    q: &[f32],
    k: &[f32],
    v: &[f32],
    sees: impl Fn(usize) -> bool,
) -> (Vec<f64>, Vec<f64>) {
    let (mut o, mut lse) = (vec![0.0; Q_HEADS * DIM], vec![f64::NEG_INFINITY; Q_HEADS]);
    for head in 0..Q_HEADS {
        let kv_head = head / (Q_HEADS / KV_HEADS);
        let mut sum = 0.0;
        for token in (0..k.len() / (KV_HEADS * DIM)).filter(|token| sees(*token)) {
            let at = (token * KV_HEADS + kv_head) * DIM;
            let dot: f64 = (0..DIM)
                .map(|i| f64::from(q[head * DIM + i]) * f64::from(k[at + i]))
                .sum();
            let weight = (dot / (DIM as f64).sqrt()).exp();
            sum += weight;
            for i in 0..DIM {
                o[head * DIM + i] += weight * f64::from(v[at + i]);
            }
        }
        if sum > 0.0 {
            o[head * DIM..][..DIM].iter_mut().for_each(|x| *x /= sum);
            lse[head] = sum.ln();
        }
    }
    (o, lse)
}

#[track_caller]
pub fn assert_close(got: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len());
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let same = f64::from(*got) == *expected; // Infinities.
        assert!(
            same || (f64::from(*got) - expected).abs() <= tolerance,
            "[{i}]: {got}, expected {expected}"
        );
    }
}

/// A service with a space, a queue, and a sequence of `n_tokens` in both layers.
pub struct Rig {
    pub queue: Queue,
    pub sequence: Sequence,
    pub space: Space,
    pub client: Client,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
}

impl Rig {
    pub fn new(n_tokens: usize) -> Self {
        Rig::with(geometry(), n_tokens)
    }

    pub fn with(params: SpaceParams, n_tokens: usize) -> Self {
        let client = open();
        let space = client.register_space(&params).unwrap();
        let queue = client.create_queue(&QueueParams::new()).unwrap();
        let sequence = space.create_sequence().unwrap();
        let mut rig = Rig {
            queue,
            sequence,
            space,
            client,
            k: kv(n_tokens, 1),
            v: kv(n_tokens, 2),
        };
        for layer in 0..LAYERS {
            if n_tokens > 0 {
                rig.fill(layer).unwrap();
            }
        }
        rig
    }

    fn fill(&mut self, layer: u32) -> Result<()> {
        let n_tokens = (self.k.len() / (KV_HEADS * DIM)) as u32;
        let item = Item::new(&self.sequence).append(n_tokens);
        let step = Step::new(&self.space, layer).item(item);
        self.queue.append(step.k(&self.k).v(&self.v))
    }

    /// One query row at the end of layer 0: o and lse.
    pub fn ask(&mut self, item: Item, q: &[f32]) -> Result<(Vec<f32>, Vec<f32>)> {
        let n_rows = q.len() / (Q_HEADS * DIM);
        let (mut o, mut lse) = (vec![0.0; q.len()], vec![0.0; n_rows * Q_HEADS]);
        let step = Step::new(&self.space, 0).item(item).q(q);
        self.queue.attend(step.o(&mut o).lse(&mut lse))?;
        Ok((o, lse))
    }
}
