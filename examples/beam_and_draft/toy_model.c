// SPDX-License-Identifier: Apache-2.0
#include "examples/beam_and_draft/toy_model.h"

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

const char kLetters[kVocabulary + 1] = " abcdefghijklmnopqrstuvwxyz.,;!?";

static struct {
  float embed[kVocabulary][kHidden];
  float q[kLayers][kQHeads * kDim][kHidden];
  float k[kLayers][kKvHeads * kDim][kHidden];
  float v[kLayers][kKvHeads * kDim][kHidden];
  float o[kLayers][kHidden][kQHeads * kDim];
  float logits[kVocabulary][kHidden];
} weights;

/* Uniform numbers with this standard deviation. */
static void fill(void* out, size_t size, double deviation) {
  static uint64_t state = 2;
  float* numbers = out;
  for (size_t i = 0; i < size / sizeof(float); ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    numbers[i] = (float)(((double)(state >> 40) / (1 << 23) - 1.0) * sqrt(3) * deviation);
  }
}

/* Later layers add less, so that the first layers alone often guess right. */
void toy_make_weights(void) {
  const double unit = 1 / sqrt(kHidden);
  fill(weights.embed, sizeof(weights.embed), 1);
  fill(weights.q, sizeof(weights.q), 5 * unit);
  fill(weights.k, sizeof(weights.k), unit);
  fill(weights.v, sizeof(weights.v), unit);
  for (int layer = 0; layer < kLayers; ++layer) {
    fill(weights.o[layer], sizeof(weights.o[layer]), 0.2 / (1 + 3 * layer));
  }
  fill(weights.logits, sizeof(weights.logits), 5 * unit);
}

static void multiply(const float* matrix, const float* x, int rows, int columns, float* out) {
  for (int r = 0; r < rows; ++r) {
    float sum = 0;
    for (int c = 0; c < columns; ++c) {
      sum += matrix[r * columns + c] * x[c];
    }
    out[r] = sum;
  }
}

static void normalise(const float* x, float* out) {
  float squares = 0;
  for (int i = 0; i < kHidden; ++i) {
    squares += x[i] * x[i];
  }
  for (int i = 0; i < kHidden; ++i) {
    out[i] = x[i] / sqrtf(squares / kHidden);
  }
}

static void rotate(float head[kDim], int position) {
  for (int i = 0; i < kDim / 2; ++i) {
    const double angle = position * pow(10000, -2.0 * i / kDim);
    const double a = head[i], b = head[i + kDim / 2];
    head[i] = (float)(a * cos(angle) - b * sin(angle));
    head[i + kDim / 2] = (float)(a * sin(angle) + b * cos(angle));
  }
}

void toy_embed(int token, float x[kHidden]) {
  memcpy(x, weights.embed[token], sizeof(weights.embed[token]));
}

void toy_project(int layer, int position, const float x[kHidden], float q[kQHeads][kDim], kv_row k,
                 kv_row v) {
  float normal[kHidden];
  normalise(x, normal);
  multiply(&weights.q[layer][0][0], normal, kQHeads * kDim, kHidden, &q[0][0]);
  multiply(&weights.k[layer][0][0], normal, kKvHeads * kDim, kHidden, &k[0][0]);
  multiply(&weights.v[layer][0][0], normal, kKvHeads * kDim, kHidden, &v[0][0]);
  for (int h = 0; h < kQHeads; ++h) {
    rotate(q[h], position);
  }
  for (int h = 0; h < kKvHeads; ++h) {
    rotate(k[h], position);
  }
}

void toy_absorb(int layer, float o[kQHeads][kDim], float x[kHidden]) {
  float change[kHidden];
  multiply(&weights.o[layer][0][0], &o[0][0], kHidden, kQHeads * kDim, change);
  for (int i = 0; i < kHidden; ++i) {
    x[i] += change[i];
  }
}

void toy_predict(const float x[kHidden], double out[kVocabulary]) {
  float normal[kHidden], logits[kVocabulary];
  double sum = 0;
  normalise(x, normal);
  multiply(&weights.logits[0][0], normal, kVocabulary, kHidden, logits);
  for (int t = 0; t < kVocabulary; ++t) {
    sum += exp(logits[t]);
  }
  for (int t = 0; t < kVocabulary; ++t) {
    out[t] = logits[t] - log(sum);
  }
}

double toy_attend(const float q[kDim], kv_row* k, kv_row* v, int n_keys, int kv_head,
                  double out[kDim]) {
  double sum = 0;
  for (int i = 0; i < kDim; ++i) {
    out[i] = 0;
  }
  for (int t = 0; t < n_keys; ++t) {
    double dot = 0;
    for (int i = 0; i < kDim; ++i) {
      dot += (double)q[i] * k[t][kv_head][i];
    }
    const double weight = exp(dot / sqrt(kDim));
    sum += weight;
    for (int i = 0; i < kDim; ++i) {
      out[i] += weight * v[t][kv_head][i];
    }
  }
  for (int i = 0; i < kDim; ++i) {
    out[i] /= sum;
  }
  return log(sum);
}
