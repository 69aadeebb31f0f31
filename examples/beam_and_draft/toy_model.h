// SPDX-License-Identifier: Apache-2.0
/* A transformer of random weights, small enough to read: what an engine's own kernels would do. It
 * computes everything but attention; toy_attend is attention in double precision, to check by. */
#ifndef KVM_EXAMPLES_BEAM_AND_DRAFT_TOY_MODEL_H_
#define KVM_EXAMPLES_BEAM_AND_DRAFT_TOY_MODEL_H_

enum { kLayers = 3, kQHeads = 4, kKvHeads = 2, kDim = 16, kHidden = 32, kVocabulary = 32 };

typedef float kv_row[kKvHeads][kDim];

/* The letter of each token. */
extern const char kLetters[kVocabulary + 1];

/* Call it before the others. */
void toy_make_weights(void);

void toy_embed(int token, float x[kHidden]);

/* q, k and v of a row of x. RoPE is the engine's: q and k come rotated by the position. */
void toy_project(int layer, int position, const float x[kHidden], float q[kQHeads][kDim], kv_row k,
                 kv_row v);

/* Adds what attention found to x. */
void toy_absorb(int layer, float o[kQHeads][kDim], float x[kHidden]);

/* Logarithms of the probabilities of the token that follows. */
void toy_predict(const float x[kHidden], double out[kVocabulary]);

/* Attention of one q head over the first n_keys rows of its kv head. Returns lse. */
double toy_attend(const float q[kDim], kv_row* k, kv_row* v, int n_keys, int kv_head,
                  double out[kDim]);

#endif  // KVM_EXAMPLES_BEAM_AND_DRAFT_TOY_MODEL_H_
