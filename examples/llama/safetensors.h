// SPDX-License-Identifier: Apache-2.0
/*
 * Reads a safetensors file: u64 length of the header (little-endian), the header as JSON, then the
 * bytes of the tensors. A header maps names to {"dtype", "shape", "data_offsets": [begin, end]},
 * and "__metadata__" to an object of strings.
 */
#ifndef KVM_EXAMPLES_LLAMA_SAFETENSORS_H_
#define KVM_EXAMPLES_LLAMA_SAFETENSORS_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { ST_MAX_DIMS = 4, ST_ERROR_BYTES = 256 };

typedef struct st_tensor {
  char* name;
  char dtype[8]; /* "BF16", "F32", "I32": as in the file */
  int n_dims;
  int64_t shape[ST_MAX_DIMS];
  const void* data; /* inside the file's memory; aligned as the file aligns it, at least to 8 */
  size_t size;      /* bytes */
} st_tensor;

typedef struct st_entry {
  char* key;
  char* value;
} st_entry;

typedef struct st_file {
  unsigned char* bytes;
  size_t size;
  st_tensor* tensors;
  size_t n_tensors;
  st_entry* metadata;
  size_t n_metadata;
} st_file;

/* Reads the file at `path` whole. Returns 0, or -1 with a sentence in error[ST_ERROR_BYTES] and
 * nothing left behind. Release with st_close. Tensors whose offsets leave the file, or whose size
 * is not that of their shape, are an error. */
int st_open(const char* path, st_file* file, char* error);

/* Releases what st_open made. A zeroed file is accepted. */
void st_close(st_file* file);

/* The tensor of this name, or NULL. */
const st_tensor* st_find(const st_file* file, const char* name);

/* The metadata string of this key, or NULL. */
const char* st_metadata(const st_file* file, const char* key);

#ifdef __cplusplus
}
#endif

#endif /* KVM_EXAMPLES_LLAMA_SAFETENSORS_H_ */
