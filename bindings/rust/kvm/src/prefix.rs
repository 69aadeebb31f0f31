// SPDX-License-Identifier: Apache-2.0
use std::fmt;
use std::ops::Deref;
use std::time::Duration;

use kvm_sys as sys;

use crate::client::{nanoseconds, Connection};
use crate::error::{check, Error, Result, Status};
use crate::sequence::SequenceId;
use crate::space::{pointer, SpaceId};

/// Tokens of a page: each full one has a [`PrefixHash`].
///
/// ```
/// assert_eq!(kvm::PREFIX_TOKENS, 64);
/// ```
pub const PREFIX_TOKENS: usize = sys::KVM_PREFIX_TOKENS as usize;

/// The hash of a page of tokens and of all before it; or a seed, which those of a space begin with.
///
/// ```
/// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
/// # let space = client.register_space(&kvm::SpaceParams::new("my-model", 2, 4, 64))?;
/// let seed: kvm::PrefixHash = space.prefix_seed(b"")?;
/// assert_ne!(seed, space.prefix_seed(b"salt of an end user")?);
/// # Ok::<(), kvm::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct PrefixHash(
    /// The bytes in `kvm.h`.
    pub [u8; 32],
);

impl PrefixHash {
    /// `hashes` as C has them.
    fn raw(hashes: &[PrefixHash]) -> *const sys::kvm_prefix_hash {
        pointer(hashes).cast() // Both are 32 bytes, and nothing else.
    }

    pub(crate) fn seed(connection: &Connection, space: SpaceId, salt: &[u8]) -> Result<Self> {
        let mut seed = sys::kvm_prefix_hash::default();
        // SAFETY: a live client, a salt of its length, and an output.
        check(unsafe {
            sys::kvm_prefix_seed(
                connection.raw(),
                space.0,
                pointer(salt).cast(),
                salt.len(),
                &mut seed,
            )
        })?;
        Ok(PrefixHash(seed.bytes))
    }
}

impl fmt::Debug for PrefixHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The hashes of the full pages of a run of tokens that may grow. A slice of [`PrefixHash`]es.
///
/// ```
/// use kvm::PrefixHashes;
/// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
/// # let space = client.register_space(&kvm::SpaceParams::new("my-model", 2, 4, 64))?;
/// let tokens: Vec<u32> = (0..200).collect();
/// let seed = space.prefix_seed(b"")?; // once
/// let mut hashes = PrefixHashes::new(seed, &tokens[..150]);
/// assert_eq!(hashes.len(), 2);
/// hashes.extend(&tokens[150..]);
/// assert_eq!(hashes[..], PrefixHashes::new(seed, &tokens)[..]);
/// assert_eq!(hashes.up_to(191).len(), 2);
/// # Ok::<(), kvm::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct PrefixHashes {
    seed: PrefixHash,
    hashes: Vec<PrefixHash>,
    /// The tokens behind the last full page.
    rest: Vec<u32>,
}

impl PrefixHashes {
    /// Those of `tokens`, which a conversation begins with. seed: of
    /// [`Space::prefix_seed`](crate::Space::prefix_seed), or the hash of the page before.
    #[must_use]
    pub fn new(seed: PrefixHash, tokens: &[u32]) -> Self {
        let mut hashes = PrefixHashes {
            seed,
            hashes: Vec::with_capacity(tokens.len() / PREFIX_TOKENS),
            rest: Vec::new(),
        };
        hashes.extend(tokens);
        hashes
    }

    /// Goes on with the tokens that follow; what was hashed is not hashed again.
    pub fn extend(&mut self, tokens: &[u32]) {
        let mut tokens = tokens;
        if !self.rest.is_empty() {
            let n = tokens.len().min(PREFIX_TOKENS - self.rest.len());
            self.rest.extend_from_slice(&tokens[..n]);
            tokens = &tokens[n..];
            if self.rest.len() < PREFIX_TOKENS {
                return;
            }
            let page = std::mem::take(&mut self.rest);
            self.extend_by_pages(&page);
        }
        let n_rest = tokens.len() % PREFIX_TOKENS;
        let (pages, rest) = tokens.split_at(tokens.len() - n_rest);
        self.extend_by_pages(pages);
        self.rest.extend_from_slice(rest);
    }

    fn extend_by_pages(&mut self, tokens: &[u32]) {
        let before = *self.hashes.last().unwrap_or(&self.seed);
        let n_before = self.hashes.len();
        let n_pages = tokens.len() / PREFIX_TOKENS;
        self.hashes.resize(n_before + n_pages, before);
        let out = self.hashes[n_before..].as_mut_ptr().cast();
        // SAFETY: a hash, the tokens, and room for the hash of each of their pages.
        let status = unsafe {
            sys::kvm_prefix_hashes(
                PrefixHash::raw(&[before]),
                pointer(tokens),
                (n_pages * PREFIX_TOKENS) as u64,
                out,
            )
        };
        assert_eq!(status, sys::KVM_OK, "it fails for null pointers only");
    }

    /// Those of the pages that end within the first `n_tokens`.
    #[must_use]
    pub fn up_to(&self, n_tokens: usize) -> &[PrefixHash] {
        &self.hashes[..self.hashes.len().min(n_tokens / PREFIX_TOKENS)]
    }

    /// Tokens that it was given, those behind the last full page included.
    #[must_use]
    pub fn n_tokens(&self) -> usize {
        self.hashes.len() * PREFIX_TOKENS + self.rest.len()
    }
}

impl Deref for PrefixHashes {
    type Target = [PrefixHash];

    fn deref(&self) -> &[PrefixHash] {
        &self.hashes
    }
}

/// A prefix that is there. See [`Space::find_prefix`](crate::Space::find_prefix).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FoundPrefix {
    /// The published sequence to fork.
    pub sequence: SequenceId,
    /// How many of its tokens are meant.
    pub n_tokens: u64,
}

impl FoundPrefix {
    pub(crate) fn find(
        connection: &Connection,
        space: SpaceId,
        hashes: &[PrefixHash],
        prefill_rate: f64,
    ) -> Result<Option<Self>> {
        let params = sys::kvm_prefix_find_params {
            space: space.0,
            hashes: PrefixHash::raw(hashes),
            n_hashes: hashes.len() as u64,
            prefill_rate,
            ..Default::default()
        };
        let mut found = sys::kvm_prefix::default();
        // SAFETY: a live client, as many hashes as are counted, and an output with its size.
        check(unsafe { sys::kvm_prefix_find(connection.raw(), &params, &mut found) })?;
        Ok((found.n_tokens != 0).then_some(FoundPrefix {
            sequence: SequenceId(found.seq),
            n_tokens: found.n_tokens,
        }))
    }
}

/// What a publication says to C beside the sequence.
pub(crate) struct Publication {
    pub(crate) hashes: *const sys::kvm_prefix_hash,
    pub(crate) n_hashes: u32,
    pub(crate) keep_ns: u64,
}

impl Publication {
    pub(crate) fn new(hashes: &[PrefixHash], keep: Option<Duration>) -> Result<Self> {
        if keep == Some(Duration::ZERO) {
            return Err(Error::new(
                Status::Invalid,
                "keep is 0; None keeps a prefix for ever",
            ));
        }
        if hashes.is_empty() {
            return Err(Error::new(Status::Invalid, "there are no hashes"));
        }
        Ok(Publication {
            hashes: PrefixHash::raw(hashes),
            // Far more than are allowed stay too many.
            n_hashes: u32::try_from(hashes.len()).unwrap_or(u32::MAX),
            keep_ns: keep.map_or(0, nanoseconds),
        })
    }
}
