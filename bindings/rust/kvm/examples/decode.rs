// SPDX-License-Identifier: Apache-2.0
//! The smallest engine: two layers, eight tokens, one step per layer and token. Compares what the
//! service answers for the last token with attention computed here, and prints both.
//!
//!     decode             through the daemon at $KVM_SOCKET (or the default socket)
//!     decode --embedded  with the engine in this process (feature `embedded`)

use std::process::ExitCode;

use kvm::{Client, CodecId, ConnectParams, EmbeddedParams, Item, QueueParams, SpaceParams, Step};

const LAYERS: u32 = 2;
const Q_HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 16;
const TOKENS: usize = 8;

/// Stands for what a model would compute: here, random numbers in [-1, 1).
fn fill(out: &mut [f32], state: &mut u32) {
    for x in out {
        *state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        *x = (*state >> 8) as f32 / (1 << 23) as f32 - 1.0;
    }
}

/// Attention of one q head over the stored tokens of its kv head, in double precision.
fn attend_here(q: &[f32], keys: &[Vec<f32>], values: &[Vec<f32>], kv_head: usize) -> [f64; DIM] {
    let mut out = [0.0; DIM];
    let mut sum = 0.0;
    for (k, v) in keys.iter().zip(values) {
        let (k, v) = (&k[kv_head * DIM..][..DIM], &v[kv_head * DIM..][..DIM]);
        let dot: f64 = q
            .iter()
            .zip(k)
            .map(|(q, k)| f64::from(*q) * f64::from(*k))
            .sum();
        let weight = (dot / (DIM as f64).sqrt()).exp();
        sum += weight;
        for (out, v) in out.iter_mut().zip(v) {
            *out += weight * f64::from(*v);
        }
    }
    out.map(|x| x / sum)
}

/// The largest difference between the service's last answer and ours.
fn decode(embedded: bool) -> kvm::Result<f64> {
    let client = if embedded {
        Client::open_embedded(&EmbeddedParams::new())?
    } else {
        Client::connect(&ConnectParams::new().client_name("decode"))?
    };
    let params = SpaceParams::new("rust-decode", LAYERS, Q_HEADS as u32, DIM as u32)
        .kv_heads(KV_HEADS as u32)
        .stored_as(CodecId::F32);
    let space = client.register_space(&params)?;
    let sequence = space.create_sequence()?;
    let mut queue = client.create_queue(&QueueParams::new())?;

    // Queries and outputs in memory shared with the service; keys and values are copied.
    let arena = client.create_arena(1 << 16)?;
    let mut q = arena.alloc::<f32>(Q_HEADS * DIM)?;
    let mut o = arena.alloc::<f32>(Q_HEADS * DIM)?;
    let mut lse = arena.alloc::<f32>(Q_HEADS)?;
    let (mut keys, mut values) = (Vec::new(), Vec::new()); // The last layer's, for the check.
    let mut state = 1;
    for _token in 0..TOKENS {
        for layer in 0..LAYERS {
            let (mut k, mut v) = (vec![0.0; KV_HEADS * DIM], vec![0.0; KV_HEADS * DIM]);
            fill(&mut k, &mut state);
            fill(&mut v, &mut state);
            fill(&mut q, &mut state);
            queue.step(
                Step::new(&space, layer)
                    .item(Item::new(&sequence).append(1).query(1))
                    .k(&k)
                    .v(&v)
                    .q(&q)
                    .o(&mut o)
                    .lse(&mut lse),
            )?;
            if layer + 1 == LAYERS {
                keys.push(k);
                values.push(v);
            }
        }
    }

    let mut worst = 0f64;
    for head in 0..Q_HEADS {
        let part = head * DIM..(head + 1) * DIM;
        let kv_head = head / (Q_HEADS / KV_HEADS);
        let expected = attend_here(&q[part.clone()], &keys, &values, kv_head);
        for (o, expected) in o[part.clone()].iter().zip(&expected) {
            worst = worst.max((f64::from(*o) - expected).abs());
        }
        println!(
            "head {head}: o[0] = {:+.6}, computed here {:+.6}, lse = {:.6}",
            o[part.start], expected[0], lse[head]
        );
    }
    Ok(worst)
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let embedded = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => false,
        ["--embedded"] => true,
        _ => {
            eprintln!("usage: decode [--embedded]; KVM_SOCKET names the daemon's socket");
            return ExitCode::from(2);
        }
    };
    match decode(embedded) {
        Ok(worst) => {
            println!("largest difference: {worst:.1e}");
            ExitCode::from(u8::from(worst >= 1e-5))
        }
        Err(error) => {
            eprintln!("decode: {error}");
            ExitCode::FAILURE
        }
    }
}
