// SPDX-License-Identifier: Apache-2.0
#include "examples/llama/safetensors.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The header's text, read from left to right. `failed` is sticky; all functions do nothing then. */
typedef struct json_cursor {
  const char* at;
  const char* end;
  bool failed;
} json_cursor;

static void skip_space(json_cursor* json) {
  while (json->at < json->end && strchr(" \t\r\n", *json->at) != NULL && *json->at != '\0') {
    ++json->at;
  }
}

static bool accept(json_cursor* json, char wanted) {
  skip_space(json);
  if (json->failed || json->at == json->end || *json->at != wanted) {
    return false;
  }
  ++json->at;
  return true;
}

static void expect(json_cursor* json, char wanted) {
  if (!accept(json, wanted)) {
    json->failed = true;
  }
}

static char unescape(json_cursor* json, char escaped) {
  static const char kNames[] = "\"\\/bfnrt";
  static const char kValues[] = "\"\\/\b\f\n\r\t";
  const char* found = escaped == '\0' ? NULL : strchr(kNames, escaped);
  if (found == NULL) { /* \uXXXX among them: names and metadata of ours are ASCII */
    json->failed = true;
    return '\0';
  }
  return kValues[found - kNames];
}

/* A string, allocated; NULL on failure. */
static char* parse_string(json_cursor* json) {
  expect(json, '"');
  if (json->failed) {
    return NULL;
  }
  char* out = malloc((size_t)(json->end - json->at) + 1);
  size_t length = 0;
  while (out != NULL && json->at < json->end && *json->at != '"') {
    char c = *json->at++;
    if (c == '\\' && json->at < json->end) {
      c = unescape(json, *json->at++);
    }
    out[length++] = c;
  }
  expect(json, '"');
  if (out == NULL || json->failed) {
    json->failed = true;
    free(out);
    return NULL;
  }
  out[length] = '\0';
  char* fitted = realloc(out, length + 1);
  return fitted != NULL ? fitted : out;
}

static int64_t parse_integer(json_cursor* json) {
  skip_space(json);
  int64_t value = 0;
  const char* first = json->at;
  while (json->at < json->end && *json->at >= '0' && *json->at <= '9') {
    if (value > (INT64_MAX - 9) / 10) {
      json->failed = true;
      return 0;
    }
    value = value * 10 + (*json->at++ - '0');
  }
  if (json->at == first) {
    json->failed = true;
  }
  return value;
}

/* [a, b, ...]; returns how many. */
static int parse_integers(json_cursor* json, int64_t* out, int capacity) {
  int count = 0;
  expect(json, '[');
  if (accept(json, ']')) {
    return 0;
  }
  do {
    const int64_t value = parse_integer(json);
    if (json->failed || count == capacity) {
      json->failed = true;
      return 0;
    }
    out[count++] = value;
  } while (accept(json, ','));
  expect(json, ']');
  return count;
}

static void parse_tensor(json_cursor* json, st_tensor* tensor, int64_t offsets[2]) {
  int n_offsets = 0;
  expect(json, '{');
  do {
    char* key = parse_string(json);
    expect(json, ':');
    if (json->failed) {
      free(key);
      return;
    }
    if (strcmp(key, "dtype") == 0) {
      char* dtype = parse_string(json);
      if (dtype != NULL) {
        snprintf(tensor->dtype, sizeof tensor->dtype, "%s", dtype);
      }
      free(dtype);
    } else if (strcmp(key, "shape") == 0) {
      tensor->n_dims = parse_integers(json, tensor->shape, ST_MAX_DIMS);
    } else if (strcmp(key, "data_offsets") == 0) {
      n_offsets = parse_integers(json, offsets, 2);
    } else {
      json->failed = true;
    }
    free(key);
  } while (!json->failed && accept(json, ','));
  expect(json, '}');
  if (n_offsets != 2) {
    json->failed = true;
  }
}

static int64_t element_bytes(const char* dtype) {
  if (strcmp(dtype, "BF16") == 0 || strcmp(dtype, "F16") == 0) {
    return 2;
  }
  return strcmp(dtype, "F32") == 0 || strcmp(dtype, "I32") == 0 ? 4 : 0;
}

/* Checks that the tensor's bytes [begin, end) lie in `room` and are what its shape needs. */
static bool fits(const st_tensor* tensor, const int64_t offsets[2], int64_t room) {
  int64_t size = element_bytes(tensor->dtype);
  for (int dim = 0; dim < tensor->n_dims; ++dim) {
    if (tensor->shape[dim] <= 0 || size > room / tensor->shape[dim]) {
      return false;
    }
    size *= tensor->shape[dim];
  }
  return size > 0 && offsets[0] <= offsets[1] && offsets[1] <= room &&
         offsets[1] - offsets[0] == size;
}

/* Makes room for one more element in an array that grows by doubling. */
static bool grow(void** array, size_t count, size_t element_size) {
  if ((count & (count - 1)) != 0) {
    return true;
  }
  void* bigger = realloc(*array, (count == 0 ? 1 : 2 * count) * element_size);
  if (bigger == NULL) {
    return false;
  }
  *array = bigger;
  return true;
}

static void parse_metadata(json_cursor* json, st_file* file) {
  expect(json, '{');
  if (accept(json, '}')) {
    return;
  }
  do {
    st_entry entry;
    entry.key = parse_string(json);
    expect(json, ':');
    entry.value = parse_string(json);
    if (json->failed || !grow((void**)&file->metadata, file->n_metadata, sizeof entry)) {
      json->failed = true;
      free(entry.key);
      free(entry.value);
      return;
    }
    file->metadata[file->n_metadata++] = entry;
  } while (accept(json, ','));
  expect(json, '}');
}

static bool parse_header(st_file* file, size_t header_size) {
  json_cursor json = {(const char*)file->bytes + 8, (const char*)file->bytes + 8 + header_size,
                      false};
  const unsigned char* data = file->bytes + 8 + header_size;
  const int64_t room = (int64_t)(file->size - 8 - header_size);
  expect(&json, '{');
  do {
    char* name = parse_string(&json);
    expect(&json, ':');
    if (name != NULL && strcmp(name, "__metadata__") == 0) {
      free(name);
      parse_metadata(&json, file);
      continue;
    }
    st_tensor tensor = {0};
    int64_t offsets[2] = {0, 0};
    tensor.name = name;
    if (!json.failed) {
      parse_tensor(&json, &tensor, offsets);
    }
    if (json.failed || !fits(&tensor, offsets, room) ||
        !grow((void**)&file->tensors, file->n_tensors, sizeof tensor)) {
      free(name);
      return false;
    }
    tensor.data = data + offsets[0];
    tensor.size = (size_t)(offsets[1] - offsets[0]);
    file->tensors[file->n_tensors++] = tensor;
  } while (accept(&json, ','));
  expect(&json, '}');
  return !json.failed;
}

static bool read_whole(const char* path, st_file* file) {
  FILE* stream = fopen(path, "rb");
  if (stream == NULL) {
    return false;
  }
  long size = -1;
  if (fseek(stream, 0, SEEK_END) == 0) {
    size = ftell(stream);
  }
  if (size >= 0 && fseek(stream, 0, SEEK_SET) == 0) {
    /* Aligned, so that the file's own alignment of its tensors carries over. */
    file->size = (size_t)size;
    file->bytes = aligned_alloc(64, (file->size + 64) / 64 * 64);
  }
  const bool ok = file->bytes != NULL && fread(file->bytes, 1, file->size, stream) == file->size;
  fclose(stream);
  return ok;
}

int st_open(const char* path, st_file* file, char* error) {
  memset(file, 0, sizeof *file);
  if (!read_whole(path, file)) {
    snprintf(error, ST_ERROR_BYTES, "cannot read %s", path);
    st_close(file);
    return -1;
  }
  uint64_t header_size = 0;
  for (size_t byte = 0; byte < 8 && byte < file->size; ++byte) {
    header_size |= (uint64_t)file->bytes[byte] << (8 * byte);
  }
  if (file->size < 8 || header_size > file->size - 8 || !parse_header(file, (size_t)header_size)) {
    snprintf(error, ST_ERROR_BYTES, "%s is not a safetensors file that this reader knows", path);
    st_close(file);
    return -1;
  }
  return 0;
}

void st_close(st_file* file) {
  for (size_t i = 0; i < file->n_tensors; ++i) {
    free(file->tensors[i].name);
  }
  for (size_t i = 0; i < file->n_metadata; ++i) {
    free(file->metadata[i].key);
    free(file->metadata[i].value);
  }
  free(file->tensors);
  free(file->metadata);
  free(file->bytes);
  memset(file, 0, sizeof *file);
}

const st_tensor* st_find(const st_file* file, const char* name) {
  for (size_t i = 0; i < file->n_tensors; ++i) {
    if (strcmp(file->tensors[i].name, name) == 0) {
      return &file->tensors[i];
    }
  }
  return NULL;
}

const char* st_metadata(const st_file* file, const char* key) {
  for (size_t i = 0; i < file->n_metadata; ++i) {
    if (strcmp(file->metadata[i].key, key) == 0) {
      return file->metadata[i].value;
    }
  }
  return NULL;
}
