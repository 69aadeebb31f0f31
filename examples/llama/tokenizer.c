// SPDX-License-Identifier: Apache-2.0
#include "examples/llama/tokenizer.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { kMaxTokenBytes = 256 }; /* a bound on what a hostile list of merges can make us allocate */

typedef struct token_bytes {
  char* bytes;
  size_t size;
} token_bytes;

/* A merge, found by its pair in a hash table. token = 0: an empty slot. */
typedef struct merge_slot {
  int32_t left;
  int32_t right;
  int32_t token;
} merge_slot;

struct tokenizer {
  token_bytes* tokens;
  size_t n_tokens;
  merge_slot* slots; /* open addressing, linear probing */
  size_t n_slots;    /* a power of two, at least twice the merges */
};

static size_t slot_of(const tokenizer* self, int32_t left, int32_t right) {
  const uint32_t hash = (uint32_t)left * 2654435761u ^ (uint32_t)right * 2246822519u;
  size_t at = (hash ^ hash >> 15) & (self->n_slots - 1);
  while (self->slots[at].token != 0 &&
         (self->slots[at].left != left || self->slots[at].right != right)) {
    at = (at + 1) & (self->n_slots - 1);
  }
  return at;
}

/* The token of the pair, or INT32_MAX: tokens are numbered in the order of the merges. */
static int32_t merged(const tokenizer* self, int32_t left, int32_t right) {
  const merge_slot* slot = &self->slots[slot_of(self, left, right)];
  return slot->token != 0 ? slot->token : INT32_MAX;
}

static bool set_bytes(token_bytes* out, const token_bytes* left, const token_bytes* right) {
  out->size = left->size + right->size;
  out->bytes = out->size <= kMaxTokenBytes ? malloc(out->size) : NULL;
  if (out->bytes == NULL) {
    return false;
  }
  memcpy(out->bytes, left->bytes, left->size);
  memcpy(out->bytes + left->size, right->bytes, right->size);
  return true;
}

static bool add_merges(tokenizer* self, const int32_t* merges, size_t n_merges) {
  for (int value = 0; value < 256; ++value) {
    token_bytes* token = &self->tokens[value];
    token->bytes = malloc(1);
    if (token->bytes == NULL) {
      return false;
    }
    token->bytes[0] = (char)value;
    token->size = 1;
    ++self->n_tokens;
  }
  for (size_t i = 0; i < n_merges; ++i) {
    const int32_t left = merges[2 * i];
    const int32_t right = merges[2 * i + 1];
    const int32_t token = (int32_t)(256 + i);
    if (left < 0 || left >= token || right < 0 || right >= token ||
        !set_bytes(&self->tokens[token], &self->tokens[left], &self->tokens[right])) {
      return false;
    }
    ++self->n_tokens;
    self->slots[slot_of(self, left, right)] = (merge_slot){left, right, token};
  }
  return true;
}

tokenizer* tokenizer_create(const int32_t* merges, size_t n_merges) {
  if (n_merges > 1u << 20) {
    return NULL;
  }
  tokenizer* self = calloc(1, sizeof *self);
  if (self == NULL) {
    return NULL;
  }
  self->n_slots = 2;
  while (self->n_slots < 2 * n_merges) {
    self->n_slots *= 2;
  }
  self->tokens = calloc(256 + n_merges, sizeof *self->tokens);
  self->slots = calloc(self->n_slots, sizeof *self->slots);
  if (self->tokens == NULL || self->slots == NULL || !add_merges(self, merges, n_merges)) {
    tokenizer_free(self);
    return NULL;
  }
  return self;
}

void tokenizer_free(tokenizer* self) {
  if (self == NULL) {
    return;
  }
  for (size_t i = 0; self->tokens != NULL && i < self->n_tokens; ++i) {
    free(self->tokens[i].bytes);
  }
  free(self->tokens);
  free(self->slots);
  free(self);
}

static bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

/* Bytes of the piece that begins at text; size >= 1. */
static size_t piece_size(const char* text, size_t size) {
  size_t end = text[0] == ' ' ? 1 : 0;
  while (end < size && is_letter(text[end])) {
    ++end;
  }
  return end == 0 ? 1 : end;
}

/* Merges tokens [count] in place; returns how many are left. */
static int merge_piece(const tokenizer* self, int32_t* tokens, int count) {
  for (;;) {
    int32_t best = INT32_MAX;
    for (int i = 0; i + 1 < count; ++i) {
      const int32_t token = merged(self, tokens[i], tokens[i + 1]);
      best = token < best ? token : best;
    }
    if (best == INT32_MAX) {
      return count;
    }
    int kept = 0;
    for (int i = 0; i < count; ++i) {
      if (i + 1 < count && merged(self, tokens[i], tokens[i + 1]) == best) {
        tokens[kept++] = best;
        ++i;
      } else {
        tokens[kept++] = tokens[i];
      }
    }
    count = kept;
  }
}

int tokenizer_encode(const tokenizer* self, const char* text, size_t size, int32_t* out,
                     int capacity) {
  int count = 0;
  int32_t* piece = malloc((size + 1) * sizeof *piece);
  if (piece == NULL || size > INT32_MAX) {
    free(piece);
    return -1;
  }
  while (size > 0) {
    const size_t length = piece_size(text, size);
    for (size_t i = 0; i < length; ++i) {
      piece[i] = (unsigned char)text[i];
    }
    const int n_tokens = merge_piece(self, piece, (int)length);
    if (n_tokens > capacity - count) {
      free(piece);
      return -1;
    }
    memcpy(out + count, piece, (size_t)n_tokens * sizeof *piece);
    count += n_tokens;
    text += length;
    size -= length;
  }
  free(piece);
  return count;
}

const char* tokenizer_decode(const tokenizer* self, int32_t token, size_t* size) {
  if (token < 0 || (size_t)token >= self->n_tokens) {
    *size = 0;
    return "";
  }
  *size = self->tokens[token].size;
  return self->tokens[token].bytes;
}
