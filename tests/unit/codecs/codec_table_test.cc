// SPDX-License-Identifier: Apache-2.0
// The table of encodings against numbers written by hand: what a page is made of.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "base/dtype.h"
#include "base/kv_view.h"
#include "codecs/codec.h"
#include "codecs/rows.h"

namespace kvm::codecs {
namespace {

TEST(CodecTable, SizesOfRowsOf128Channels) {
  struct Row {
    const char* name;
    CodecId id;
    uint64_t row_bytes, head_rows_bytes, head_params_bytes, token_bytes;
  };
  for (const Row& row : {Row{"fp32", CodecId::kF32, 512, 32768, 0, 512},
                         Row{"fp16", CodecId::kF16, 256, 16384, 0, 256},
                         Row{"bf16", CodecId::kBf16, 256, 16384, 0, 256},
                         Row{"int8", CodecId::kI8, 128, 8192, 128, 130},
                         Row{"fp8", CodecId::kF8, 128, 8192, 128, 130},
                         Row{"int8_channel", kI8Channel, 128, 8192, 256, 132},
                         Row{"int4", kI4, 64, 4096, 512, 72},
                         Row{"int4_channel", kI4Channel, 64, 4096, 512, 72},
                         Row{"int4_centred", kI4Centred, 64, 4096, 768, 76},
                         Row{"int2", kI2, 32, 2048, 512, 40},
                         Row{"int2_channel", kI2Channel, 32, 2048, 512, 40},
                         Row{"int2_centred", kI2Centred, 32, 2048, 768, 44},
                         Row{"gear4_channel", kGear4Channel, 64, 4096, 2048, 96},
                         Row{"gear4", kGear4, 64, 4096, 1792, 92},
                         Row{"gear2_channel", kGear2Channel, 32, 2048, 2048, 64},
                         Row{"gear2", kGear2, 32, 2048, 1792, 60},
                         Row{"int4_balanced", kI4Balanced, 64, 4096, 768, 76},
                         Row{"int2_balanced", kI2Balanced, 32, 2048, 768, 44},
                         Row{"int3", kI3, 48, 3072, 512, 56},
                         Row{"int3_channel", kI3Channel, 48, 3072, 512, 56},
                         Row{"int3_centred", kI3Centred, 48, 3072, 768, 60},
                         Row{"int3_balanced", kI3Balanced, 48, 3072, 768, 60},
                         Row{"gear3_channel", kGear3Channel, 48, 3072, 2048, 80},
                         Row{"gear3", kGear3, 48, 3072, 1792, 76}}) {
    SCOPED_TRACE(row.name);
    const Codec* codec = find_codec(row.name);
    ASSERT_NE(codec, nullptr);
    EXPECT_EQ(codec->id, row.id);
    EXPECT_EQ(&codec_of(row.id), codec);
    EXPECT_TRUE(codec_is_known(static_cast<uint32_t>(row.id)));
    EXPECT_EQ(codec->row_bytes(128), row.row_bytes);
    EXPECT_EQ(codec->head_rows_bytes(128), row.head_rows_bytes);
    EXPECT_EQ(codec->head_params_bytes(128), row.head_params_bytes);
    EXPECT_EQ(codec->token_bytes(128), row.token_bytes);
    EXPECT_EQ(codec->is_scaled(), row.head_params_bytes != 0);
    const bool is_block = row.id >= kI8Channel;
    EXPECT_EQ(codec->rows_stand_alone(), !is_block);
    EXPECT_EQ(codec->has_kernels(), !is_block);
    EXPECT_EQ(codec->tail, is_block ? CodecId::kBf16 : row.id);
  }
}

TEST(CodecTable, WhatIsNotThereIsNotFound) {
  for (const uint32_t id : {uint32_t{0}, static_cast<uint32_t>(kCodecs.size() + 1), UINT32_MAX}) {
    EXPECT_FALSE(codec_is_known(id)) << id;
  }
  for (const char* name : {"", "Int8", "int8x", "bf1"}) {
    EXPECT_EQ(find_codec(name), nullptr) << name;
  }
}

TEST(CodecTable, RowsOfTensorsAreThoseOfACodec) {
  for (const Dtype dtype : {Dtype::kF32, Dtype::kF16, Dtype::kBf16}) {
    const Codec& codec = codec_of(codec_of_tensor(dtype));
    EXPECT_STREQ(codec.name, dtype_name(dtype));
    EXPECT_EQ(codec.row_bytes(40), 40 * dtype_size_bytes(dtype));
  }
}

TEST(CodecTable, RowsAndScalesLieHeadByHead) {
  static uint8_t rows[3 * 64 * 256] = {};
  static uint16_t params[3 * 64] = {};
  const KvPlane scaled{rows, params, CodecId::kI8};
  EXPECT_EQ(row_at(scaled, 128, 2, 5) - rows, (2 * 64 + 5) * 128);
  EXPECT_EQ(params_at(scaled, 128, 2) - params, 2 * 64);
  EXPECT_EQ(row_scale_at(scaled, 2, 5) - params, 2 * 64 + 5);
  const KvPlane by_channel{rows, params, kI8Channel};
  EXPECT_EQ(row_at(by_channel, 128, 2, 5) - rows, (2 * 64 + 5) * 128);
  EXPECT_EQ(params_at(by_channel, 128, 2) - params, 2 * 128);
  EXPECT_EQ(row_scale_at(by_channel, 2, 5), nullptr);
  const KvPlane plain{rows, nullptr, CodecId::kF16};
  EXPECT_EQ(row_at(plain, 128, 2, 5) - rows, (2 * 64 + 5) * 256);
  EXPECT_EQ(params_at(plain, 128, 2), nullptr);
  EXPECT_EQ(row_scale_at(plain, 2, 5), nullptr);
}

}  // namespace
}  // namespace kvm::codecs
