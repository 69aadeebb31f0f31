// SPDX-License-Identifier: Apache-2.0
/* kvm-llama: generates text with the example model. Its KV cache is kvm's. */
#define _POSIX_C_SOURCE 200809L
#include <getopt.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "examples/llama/check.h"
#include "examples/llama/kvm_attention.h"
#include "examples/llama/llama.h"
#include "examples/llama/private_attention.h"
#include "examples/llama/sampler.h"

enum { kMaxPrompts = 256 };

static const float kTolerance = 1e-2f; /* of --check, on logits */

typedef struct options {
  const char* weights;
  const char* prompts; /* file of --check, a prompt a line */
  const char* prompt;
  int n_tokens;
  sampler sampling;
  bool private_cache;
  bool check;
  kvm_attention_params kvm;
} options;

static void print_help(void) {
  puts(
      "usage: kvm-llama [options] [PROMPT]\n"
      "Generates text that goes on from PROMPT. Keys and values are kept by kvmd, or by\n"
      "  -p, --private            this program itself: no kvm\n"
      "  -e, --embedded           an engine in this process (kvm-llama-embedded only)\n"
      "  -s, --socket PATH        the daemon that listens there [$KVM_SOCKET]\n"
      "and\n"
      "  -n, --tokens N           tokens to generate [200]\n"
      "  -t, --temperature T      0: always the most likely token [0.7]\n"
      "  -k, --top-k K            draw among the K most likely tokens; 0: all [40]\n"
      "      --seed S             of the random numbers [1]\n"
      "  -d, --dtype f16|bf16|f32 of stored keys and values [f16]\n"
      "      --exact-values       with bf16: weights times values in fp32\n"
      "  -w, --weights FILE       [the tree's examples/llama/model.safetensors]\n"
      "      --check              compare kvm's logits with those of --private over --prompts,\n"
      "                           200 tokens each; exit status 1 when they differ too much\n"
      "      --prompts FILE       a prompt a line [the tree's examples/llama/prompts.txt]");
}

enum { kOptSeed = 256, kOptExactValues, kOptCheck, kOptPrompts };

static bool parse_dtype(const char* text, llama_dtype* out) {
  if (strcmp(text, "f16") == 0) {
    *out = LLAMA_F16;
  } else if (strcmp(text, "bf16") == 0) {
    *out = LLAMA_BF16;
  } else if (strcmp(text, "f32") == 0) {
    *out = LLAMA_F32;
  } else {
    return false;
  }
  return true;
}

/* A number in [low, high], all of the text. */
static bool parse_number(const char* text, double low, double high, double* out) {
  char* end = NULL;
  *out = strtod(text, &end);
  return end != text && *end == '\0' && *out >= low && *out <= high;
}

/* One option; false: its argument is wrong. */
static bool apply_option(int option, const char* argument, options* out) {
  double number = 0;
  switch (option) {
    case 'p':
      out->private_cache = true;
      return true;
    case 'e':
      out->kvm.embedded = 1;
      return true;
    case 's':
      out->kvm.socket_path = argument;
      return true;
    case 'n':
      out->n_tokens = parse_number(argument, 1, 1 << 20, &number) ? (int)number : 0;
      return out->n_tokens > 0;
    case 't':
      out->sampling.temperature = parse_number(argument, 0, 100, &number) ? (float)number : -1;
      return out->sampling.temperature >= 0;
    case 'k':
      out->sampling.top_k = parse_number(argument, 0, 1 << 20, &number) ? (int)number : -1;
      return out->sampling.top_k >= 0;
    case 'd':
      return parse_dtype(argument, &out->kvm.dtype);
    case 'w':
      out->weights = argument;
      return true;
    case kOptSeed: {
      char* end = NULL;
      out->sampling.state = strtoull(argument, &end, 0);
      return end != argument && *end == '\0';
    }
    case kOptExactValues:
      out->kvm.exact_values = 1;
      return true;
    case kOptCheck:
      out->check = true;
      return true;
    case kOptPrompts:
      out->prompts = argument;
      return true;
    default:
      return false;
  }
}

/* Returns -1 to go on, or the exit status. */
static int parse_options(int argc, char** argv, options* out) {
  static const struct option kOptions[] = {
      {"private", no_argument, NULL, 'p'},
      {"embedded", no_argument, NULL, 'e'},
      {"socket", required_argument, NULL, 's'},
      {"tokens", required_argument, NULL, 'n'},
      {"temperature", required_argument, NULL, 't'},
      {"top-k", required_argument, NULL, 'k'},
      {"dtype", required_argument, NULL, 'd'},
      {"weights", required_argument, NULL, 'w'},
      {"seed", required_argument, NULL, kOptSeed},
      {"exact-values", no_argument, NULL, kOptExactValues},
      {"check", no_argument, NULL, kOptCheck},
      {"prompts", required_argument, NULL, kOptPrompts},
      {"help", no_argument, NULL, 'h'},
      {NULL, 0, NULL, 0},
  };
  for (;;) {
    const int option = getopt_long(argc, argv, "pes:n:t:k:d:w:h", kOptions, NULL);
    if (option == -1) {
      break;
    }
    if (option == 'h') {
      print_help();
      return 0;
    }
    if (option == '?') { /* getopt has said what is wrong */
      return 2;
    }
    if (!apply_option(option, optarg, out)) {
      const struct option* wrong = kOptions;
      while (wrong->val != option) {
        ++wrong;
      }
      fprintf(stderr, "kvm-llama: --%s cannot be '%s'; see --help\n", wrong->name, optarg);
      return 2;
    }
  }
  if (argc - optind > 1) {
    fprintf(stderr, "kvm-llama: one prompt, please; quote it\n");
    return 2;
  }
  if (optind < argc) {
    out->prompt = argv[optind];
  }
  return -1;
}

static llama_attention* open_attention(const options* given, const llama_model* model,
                                       bool private_cache, char* error) {
  if (!private_cache) {
    return kvm_attention_create(model, &given->kvm, error);
  }
  llama_attention* attention =
      private_attention_create(&model->config, given->kvm.dtype, model->config.context);
  if (attention == NULL) {
    snprintf(error, ST_ERROR_BYTES, "out of memory");
  }
  return attention;
}

static double seconds(uint64_t ns) { return (double)ns * 1e-9; }

static void print_token(const llama_model* model, int32_t token) {
  size_t size = 0;
  const char* bytes = tokenizer_decode(model->tokens, token, &size);
  fwrite(bytes, 1, size, stdout);
  fflush(stdout);
}

/* Prefills tokens [n_prompt]; logits receives those of the last. */
static bool prefill(const llama_model* model, llama_scratch* scratch, llama_attention* attention,
                    const int32_t* tokens, int n_prompt, float* logits) {
  for (int position = 0; position < n_prompt;) {
    int n = n_prompt - position;
    n = n < LLAMA_MAX_CHUNK ? n : LLAMA_MAX_CHUNK;
    if (llama_forward(model, scratch, attention, tokens + position, n, position, logits,
                      position + n == n_prompt ? 1 : 0) != 0) {
      return false;
    }
    position += n;
  }
  return true;
}

/* Prints the continuation and, on stderr, how fast it came. */
static bool generate(const options* given, const llama_model* model, llama_scratch* scratch,
                     llama_attention* attention, const int32_t* tokens, int n_prompt,
                     float* logits) {
  sampler next = given->sampling;
  const uint64_t started = llama_now_ns();
  fputs(given->prompt, stdout);
  if (!prefill(model, scratch, attention, tokens, n_prompt, logits)) {
    return false;
  }
  const uint64_t prefilled = llama_now_ns();
  const uint64_t prefill_step_ns = attention->step_ns;
  int n_generated = 0;
  while (n_generated < given->n_tokens && n_prompt + n_generated < model->config.context) {
    const int32_t token = sampler_next(&next, logits, model->config.vocabulary);
    ++n_generated;
    if (token == TOKENIZER_DOCUMENT_START) { /* the model has come to an end */
      break;
    }
    print_token(model, token);
    if (llama_forward(model, scratch, attention, &token, 1, n_prompt + n_generated - 1, logits,
                      1) != 0) {
      return false;
    }
  }
  const uint64_t ended = llama_now_ns();
  putchar('\n');
  fflush(stdout);
  fprintf(stderr,
          "[kvm-llama] prompt: %d tokens in %.2f ms; generated: %d tokens in %.3f s, "
          "%.0f tokens/s; attention (%s): %.0f %% of it\n",
          n_prompt, seconds(prefilled - started) * 1e3, n_generated, seconds(ended - prefilled),
          n_generated / seconds(ended - prefilled),
          given->private_cache  ? "private"
          : given->kvm.embedded ? "embedded kvm"
                                : "kvmd",
          100 * seconds(attention->step_ns - prefill_step_ns) / seconds(ended - prefilled));
  return true;
}

static int run_generate(const options* given, const llama_model* model) {
  char error[ST_ERROR_BYTES] = "out of memory";
  const int context = model->config.context;
  int32_t* tokens = calloc((size_t)context, sizeof *tokens);
  float* logits = calloc((size_t)model->config.vocabulary, sizeof *logits);
  llama_scratch* scratch = llama_scratch_create(&model->config);
  llama_attention* attention = NULL;
  bool ok = tokens != NULL && logits != NULL && scratch != NULL;
  if (ok) {
    tokens[0] = TOKENIZER_DOCUMENT_START;
    const int n_prompt = tokenizer_encode(model->tokens, given->prompt, strlen(given->prompt),
                                          tokens + 1, context - 1);
    attention = n_prompt < 0 ? NULL : open_attention(given, model, given->private_cache, error);
    if (n_prompt < 0) {
      snprintf(error, sizeof error, "the prompt is longer than the model's context of %d tokens",
               context);
    }
    ok = attention != NULL;
    if (ok && !generate(given, model, scratch, attention, tokens, 1 + n_prompt, logits)) {
      memcpy(error, attention->error, sizeof error);
      ok = false;
    }
  }
  if (!ok) {
    fprintf(stderr, "kvm-llama: %s\n", error);
  }
  if (attention != NULL) {
    attention->close(attention);
  }
  llama_scratch_free(scratch);
  free(logits);
  free(tokens);
  return ok ? 0 : 2;
}

/* Splits text into its lines, in place; empty ones are left out. */
static size_t split_lines(char* text, char** lines, size_t capacity) {
  size_t count = 0;
  for (char* line = text; line != NULL && *line != '\0' && count < capacity;) {
    char* end = strchr(line, '\n');
    if (end != NULL) {
      *end++ = '\0';
    }
    if (*line != '\0') {
      lines[count++] = line;
    }
    line = end;
  }
  return count;
}

static int report(const check_result* result, size_t n_prompts) {
  const bool ok = result->worst <= kTolerance && result->n_wrong_argmax == 0;
  printf(
      "check %s: prompts=%zu tokens=%ld max_abs_logit_difference=%.3e (prompt %zu, position %d, "
      "%s) argmax_differs=%ld near_ties=%ld tolerance=%.0e\n",
      ok ? "passed" : "FAILED", n_prompts, result->n_tokens, (double)result->worst,
      result->worst_prompt + 1, result->worst_position, result->worst_phase, result->n_wrong_argmax,
      result->n_near_ties, (double)kTolerance);
  return ok ? 0 : 1;
}

static int run_check(const options* given, const llama_model* model) {
  static char text[1 << 16];
  char* prompts[kMaxPrompts];
  char error[ST_ERROR_BYTES];
  FILE* stream = fopen(given->prompts, "r");
  if (stream == NULL) {
    fprintf(stderr, "kvm-llama: cannot read %s\n", given->prompts);
    return 2;
  }
  text[fread(text, 1, sizeof text - 1, stream)] = '\0';
  fclose(stream);
  const size_t n_prompts = split_lines(text, prompts, kMaxPrompts);
  llama_attention* reference = open_attention(given, model, true, error);
  llama_attention* tested =
      reference != NULL ? open_attention(given, model, given->private_cache, error) : NULL;
  check_result result;
  int status = 2;
  if (tested != NULL && check_attention(model, reference, tested, prompts, n_prompts,
                                        given->n_tokens, kTolerance, &result, error) == 0) {
    status = report(&result, n_prompts);
  } else {
    fprintf(stderr, "kvm-llama: %s\n", error);
  }
  if (tested != NULL) {
    tested->close(tested);
  }
  if (reference != NULL) {
    reference->close(reference);
  }
  return status;
}

int main(int argc, char** argv) {
  options given = {
      .weights = KVM_LLAMA_DIR "/model.safetensors",
      .prompts = KVM_LLAMA_DIR "/prompts.txt",
      .prompt = "And it came to pass",
      .n_tokens = 200,
      .sampling = {0.7f, 40, 1},
      .kvm = {.dtype = LLAMA_F16},
  };
  const int status = parse_options(argc, argv, &given);
  if (status >= 0) {
    return status;
  }
  llama_model model;
  char error[ST_ERROR_BYTES];
  if (llama_model_load(given.weights, &model, error) != 0) {
    fprintf(stderr, "kvm-llama: %s\n", error);
    return 2;
  }
  const int result = given.check ? run_check(&given, &model) : run_generate(&given, &model);
  llama_model_free(&model);
  return result;
}
