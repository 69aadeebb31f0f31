// SPDX-License-Identifier: Apache-2.0
use std::ffi::CStr;
use std::ptr;

use kvm_sys as sys;

use crate::client::c_string;
use crate::error::{check, text_of, Error, Result, Status};

/// A published system by its name, with the settings of its paper: what heads keep, how they store
/// it, which layers share.
///
/// kvm.h lists them (`kvm_preset_params`), with their sources. Setters change what the paper says.
///
/// ```
/// use kvm::{Preset, SpaceParams};
/// # let client = kvm::Client::open_embedded(&kvm::EmbeddedParams::new().threads(1))?;
/// let params = SpaceParams::new("my-model", 32, 32, 128).preset("h2o")?;
/// client.register_space(&params)?;
///
/// let preset = Preset::new("h2o").tokens(10_000).share(0.5);
/// assert!(preset.describe(32)?.contains("2500 with most attention"));
///
/// let error = SpaceParams::new("my-model", 32, 32, 128).preset("h20").unwrap_err();
/// assert!(error.message().contains("the nearest is h2o"));
/// # Ok::<(), kvm::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Preset {
    name: String,
    n_tokens: u64,
    share: f32,
    speed_up: u32,
    n_pairs: u32,
    window: u64,
    slack: u64,
    masks: Option<Vec<[u64; 2]>>,
}

/// What a preset comes to.
pub(crate) struct Entries {
    pub(crate) layers: Vec<sys::kvm_layer_params>,
    pub(crate) policies: Vec<sys::kvm_policy_params>,
    pub(crate) codecs: Vec<sys::kvm_codec_params>,
    pub(crate) indexes: Vec<sys::kvm_index_params>,
    pub(crate) default_mode: u32,
    pub(crate) default_budget: u64,
    text: String,
}

impl Preset {
    /// The system of this name, as its paper has it.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Preset {
            name: name.into(),
            ..Default::default()
        }
    }

    /// The names of all presets.
    ///
    /// ```
    /// assert!(kvm::Preset::names().any(|name| name == "streaming_llm"));
    /// ```
    pub fn names() -> impl Iterator<Item = &'static str> {
        (0..).map_while(|index| {
            // SAFETY: takes any number.
            let name = unsafe { sys::kvm_preset_name(index) };
            // SAFETY: not null, a string that lives as long as the program.
            (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) }.to_str().unwrap_or("?"))
        })
    }

    /// What shares are of: the length of prompts, say. Default: 4,096.
    #[must_use]
    pub fn tokens(mut self, n_tokens: u64) -> Self {
        self.n_tokens = n_tokens;
        self
    }

    /// How much of these tokens a head keeps.
    #[must_use]
    pub fn share(mut self, share: f32) -> Self {
        self.share = share;
        self
    }

    /// `unified_layer_skipping`: one of so many layers decodes. Default: 2.
    #[must_use]
    pub fn speed_up(mut self, speed_up: u32) -> Self {
        self.speed_up = speed_up;
        self
    }

    /// `minicache`: pairs of layers, from the last on. Default: a quarter of the layers.
    #[must_use]
    pub fn pairs(mut self, n_pairs: u32) -> Self {
        self.n_pairs = n_pairs;
        self
    }

    /// `yi_lightning`: tokens of a window. Default: 4,096.
    #[must_use]
    pub fn window(mut self, n_tokens: u64) -> Self {
        self.window = n_tokens;
        self
    }

    /// Tokens kept beyond windows, so that truncate has room.
    #[must_use]
    pub fn slack(mut self, n_tokens: u64) -> Self {
        self.slack = n_tokens;
        self
    }

    /// `duo_attention`, `razor_attention`: of each layer, the kv heads that do not retrieve, below
    /// 128.
    ///
    /// ```
    /// use kvm::Preset;
    /// let preset = Preset::new("duo_attention").heads([vec![0, 1], vec![], vec![3]]);
    /// assert!(preset.describe(3)?.starts_with("3 kv heads"));
    /// assert!(preset.describe(4).is_err()); // the table is for 3 layers
    /// # Ok::<(), kvm::Error>(())
    /// ```
    #[must_use]
    pub fn heads<I: IntoIterator<Item = u32>>(
        mut self,
        layers: impl IntoIterator<Item = I>,
    ) -> Self {
        let mask_of = |heads: I| {
            heads.into_iter().fold([0; 2], |mut mask: [u64; 2], head| {
                if let Some(word) = mask.get_mut(head as usize / 64) {
                    *word |= 1 << (head % 64);
                }
                mask
            })
        };
        self.masks = Some(layers.into_iter().map(mask_of).collect());
        self
    }

    /// What it comes to in a model of so many layers, in words, and what else the engine does.
    pub fn describe(&self, n_layers: u32) -> Result<String> {
        Ok(self.resolve(n_layers)?.text)
    }

    pub(crate) fn resolve(&self, n_layers: u32) -> Result<Entries> {
        let name = c_string(self.name.as_bytes(), "the name of a preset")?;
        if let Some(masks) = &self.masks {
            if masks.len() != n_layers as usize {
                return Err(Error::new(
                    Status::Invalid,
                    format!("heads are for {} layers; there are {n_layers}", masks.len()),
                ));
            }
        }
        let params = sys::kvm_preset_params {
            name: name.as_ptr(),
            n_layers,
            n_tokens: self.n_tokens,
            share: self.share,
            speed_up: self.speed_up,
            n_pairs: self.n_pairs,
            window: self.window,
            slack: self.slack,
            kv_head_masks: self
                .masks
                .as_ref()
                .map_or(ptr::null(), |masks| masks.as_ptr().cast()),
            ..Default::default()
        };
        let n = n_layers.min(512) as usize; // the most that there may be
        let mut entries = Entries {
            layers: vec![Default::default(); n],
            policies: vec![Default::default(); n],
            codecs: vec![Default::default(); n],
            indexes: vec![Default::default(); n],
            default_mode: 0,
            default_budget: 0,
            text: String::new(),
        };
        let mut out = sys::kvm_preset {
            n_layer_params: n as u32,
            n_policies: n as u32,
            n_codecs: n as u32,
            layers: entries.layers.as_mut_ptr(),
            policies: entries.policies.as_mut_ptr(),
            codecs: entries.codecs.as_mut_ptr(),
            n_indexes: n as u32,
            indexes: entries.indexes.as_mut_ptr(),
            ..Default::default()
        };
        // SAFETY: a string and a table of n_layers pairs that live through the call, and arrays
        // with the room that is said.
        check(unsafe { sys::kvm_policy_preset(&params, &mut out) })?;
        entries.layers.truncate(out.n_layer_params as usize);
        entries.policies.truncate(out.n_policies as usize);
        entries.codecs.truncate(out.n_codecs as usize);
        entries.indexes.truncate(out.n_indexes as usize);
        entries.default_mode = out.default_mode;
        entries.default_budget = out.default_budget;
        entries.text = text_of(&out.text);
        Ok(entries)
    }
}

impl From<&str> for Preset {
    fn from(name: &str) -> Self {
        Preset::new(name)
    }
}
