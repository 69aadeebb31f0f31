// SPDX-License-Identifier: Apache-2.0
/*
 * Byte-pair tokenizer. Tokens 0 to 255 are the bytes; token 256 + i is the concatenation of the
 * pair merges[i]. Byte 0 opens a document. Text is cut into pieces (a run of letters with at most
 * one space before it, or any other single byte), and in each piece the lowest-numbered merge is
 * applied until none is left: any text can be encoded, and decoding gives it back.
 */
#ifndef KVM_EXAMPLES_LLAMA_TOKENIZER_H_
#define KVM_EXAMPLES_LLAMA_TOKENIZER_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { TOKENIZER_DOCUMENT_START = 0 };

typedef struct tokenizer tokenizer;

/* merges [n_merges][2]: each names tokens below its own; copied. NULL when one does not, or when
 * memory is short. Release with tokenizer_free. */
tokenizer* tokenizer_create(const int32_t* merges, size_t n_merges);
void tokenizer_free(tokenizer* self);

/* Encodes `size` bytes of text into out [capacity], which `size` entries always satisfy. Returns
 * the number of tokens, or -1 when they are more than capacity or memory is short. */
int tokenizer_encode(const tokenizer* self, const char* text, size_t size, int32_t* out,
                     int capacity);

/* The bytes of a token, not terminated; *size receives their number. "" for unknown tokens. Valid
 * as long as the tokenizer. */
const char* tokenizer_decode(const tokenizer* self, int32_t token, size_t* size);

#ifdef __cplusplus
}
#endif

#endif /* KVM_EXAMPLES_LLAMA_TOKENIZER_H_ */
