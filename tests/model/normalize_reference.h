/* Made by tests/reference/normalize_reference.py with torch 2.15.0. */
#include <stdint.h>

/* Bytes 0, 1 ... 255 in each of `channels` channels of 16 x 16; floats[i] = i / 7 - 50 in float32, alike. */
static const struct {
    int channels, means, stds; /* means, stds: how many are given; 0: no normalisation */
    float mean[3], std[3];
    uint32_t last_byte, last_float; /* bits of the last element */
    uint64_t fnv_bytes, fnv_floats; /* FNV-1a over all */
} normalize_reference[] = {
    {1, 0, 0, {0.0f, 0.0f, 0.0f}, {0.0f, 0.0f, 0.0f}, 0x3f800000, 0xc1592494, UINT64_C(0x8a057589586aaf97), UINT64_C(0x1dabc382dadebe4e)},
    {1, 1, 1, {0.286f, 0.0f, 0.0f}, {0.353f, 0.0f, 0.0f}, 0x4001734f, 0xc21d0654, UINT64_C(0xe4707a0d662fb8db), UINT64_C(0x4605cf29f32f7d7e)},
    {1, 1, 1, {0.1307f, 0.0f, 0.0f}, {0.3081f, 0.0f, 0.0f}, 0x4034933d, 0xc231e45a, UINT64_C(0x982ab1b9fe87498a), UINT64_C(0xcd2246f61653049d)},
    {3, 3, 3, {0.485f, 0.456f, 0.406f}, {0.229f, 0.224f, 0.225f}, 0x4028f5c3, 0x43837a8e, UINT64_C(0xe24d709a66de7cc0), UINT64_C(0x72ed6533e3f3e395)},
    {3, 1, 3, {0.5f, 0.0f, 0.0f}, {0.229f, 0.224f, 0.225f}, 0x400e38e4, 0x43834514, UINT64_C(0x7db0ff8264d75ca7), UINT64_C(0x452361f1272ea57c)},
    {3, 3, 1, {0.485f, 0.456f, 0.406f}, {0.5f, 0.0f, 0.0f}, 0x3f981062, 0x42eca966, UINT64_C(0x500371a9bedfbd9e), UINT64_C(0x9cd29970bb446535)},
};
