// SPDX-License-Identifier: Apache-2.0
#include "examples/llama/check.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "examples/llama/sampler.h"

typedef struct check_run {
  const llama_model* model;
  llama_scratch* scratch;
  int32_t* tokens; /* [context] of the present prompt */
  float* expected; /* [context][vocabulary] of the reference */
  float* logits;   /* [LLAMA_MAX_CHUNK][vocabulary] */
  float tolerance;
  check_result* result;
  char* error;
} check_run;

static int smaller(int a, int b) { return a < b ? a : b; }

static bool reset(check_run* run, llama_attention* attention) {
  if (attention->reset(attention) == 0) {
    return true;
  }
  snprintf(run->error, ST_ERROR_BYTES, "%s", attention->error);
  return false;
}

/* Logits of all tokens [position, position + n). */
static bool forward(check_run* run, llama_attention* attention, int position, int n, float* out) {
  if (llama_forward(run->model, run->scratch, attention, run->tokens + position, n, position, out,
                    n) == 0) {
    return true;
  }
  snprintf(run->error, ST_ERROR_BYTES, "%s", attention->error);
  return false;
}

/* Fills tokens beyond the prompt and `expected`. */
static bool run_reference(check_run* run, llama_attention* reference, int n_prompt, int n_all) {
  const int vocabulary = run->model->config.vocabulary;
  sampler next = {0.8f, 40, 1};
  if (!reset(run, reference)) {
    return false;
  }
  for (int position = 0; position < n_all;) {
    const int n = position < n_prompt ? smaller(n_prompt - position, LLAMA_MAX_CHUNK) : 1;
    float* out = run->expected + (size_t)position * (size_t)vocabulary;
    if (!forward(run, reference, position, n, out)) {
      return false;
    }
    position += n;
    if (position >= n_prompt && position < n_all) {
      memcpy(run->logits, out + (size_t)(n - 1) * (size_t)vocabulary,
             (size_t)vocabulary * sizeof *out);
      run->tokens[position] = sampler_next(&next, run->logits, vocabulary);
    }
  }
  return true;
}

static void compare(check_run* run, size_t prompt, int position, const char* phase,
                    const float* logits) {
  const int vocabulary = run->model->config.vocabulary;
  const float* expected = run->expected + (size_t)position * (size_t)vocabulary;
  check_result* result = run->result;
  const int32_t best = sampler_argmax(expected, vocabulary);
  float margin = INFINITY;
  for (int32_t token = 0; token < vocabulary; ++token) {
    float difference = fabsf(logits[token] - expected[token]);
    difference = isnan(difference) ? INFINITY : difference;
    if (difference > result->worst) {
      result->worst = difference;
      result->worst_prompt = prompt;
      result->worst_position = position;
      result->worst_phase = phase;
    }
    if (token != best) {
      margin = fminf(margin, expected[best] - expected[token]);
    }
  }
  ++result->n_tokens;
  if (!(margin > run->tolerance)) {
    ++result->n_near_ties;
  } else if (sampler_argmax(logits, vocabulary) != best) {
    ++result->n_wrong_argmax;
  }
}

/* One pass of the tested attention; tokens below n_chunked go in chunks, the rest one by one. */
static bool run_tested(check_run* run, llama_attention* tested, size_t prompt, const char* phase,
                       int n_chunked, int n_all) {
  const int vocabulary = run->model->config.vocabulary;
  if (!reset(run, tested)) {
    return false;
  }
  for (int position = 0; position < n_all;) {
    const int n = position < n_chunked ? smaller(n_chunked - position, LLAMA_MAX_CHUNK) : 1;
    if (!forward(run, tested, position, n, run->logits)) {
      return false;
    }
    for (int row = 0; row < n; ++row) {
      compare(run, prompt, position + row, phase, run->logits + (size_t)row * (size_t)vocabulary);
    }
    position += n;
  }
  return true;
}

static bool run_prompt(check_run* run, llama_attention* reference, llama_attention* tested,
                       size_t index, const char* prompt, int n_generate) {
  const int capacity = run->model->config.context - n_generate;
  run->tokens[0] = TOKENIZER_DOCUMENT_START;
  const int n_prompt = capacity < 1 ? -1
                                    : tokenizer_encode(run->model->tokens, prompt, strlen(prompt),
                                                       run->tokens + 1, capacity - 1);
  if (n_prompt < 0) {
    snprintf(run->error, ST_ERROR_BYTES,
             "prompt %zu and %d tokens are more than the model's context of %d", index + 1,
             n_generate, run->model->config.context);
    return false;
  }
  const int n_all = 1 + n_prompt + n_generate;
  return run_reference(run, reference, 1 + n_prompt, n_all) &&
         run_tested(run, tested, index, "decode", 1 + n_prompt, n_all) &&
         run_tested(run, tested, index, "prefill", n_all, n_all);
}

int check_attention(const llama_model* model, llama_attention* reference, llama_attention* tested,
                    char* const* prompts, size_t n_prompts, int n_generate, float tolerance,
                    check_result* result, char* error) {
  const size_t row = (size_t)model->config.vocabulary * sizeof(float);
  check_run run = {.model = model, .tolerance = tolerance, .result = result, .error = error};
  memset(result, 0, sizeof *result);
  result->worst_phase = "decode";
  run.scratch = llama_scratch_create(&model->config);
  run.tokens = calloc((size_t)model->config.context, sizeof *run.tokens);
  run.expected = calloc((size_t)model->config.context, row);
  run.logits = calloc(LLAMA_MAX_CHUNK, row);
  bool ok = run.scratch != NULL && run.tokens != NULL && run.expected != NULL && run.logits != NULL;
  if (!ok) {
    snprintf(error, ST_ERROR_BYTES, "out of memory");
  }
  for (size_t i = 0; ok && i < n_prompts; ++i) {
    ok = run_prompt(&run, reference, tested, i, prompts[i], n_generate);
  }
  llama_scratch_free(run.scratch);
  free(run.tokens);
  free(run.expected);
  free(run.logits);
  return ok ? 0 : -1;
}
