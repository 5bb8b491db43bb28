/* Any bytes as a job file: refused with a reason, or read, printed, and read again to the same message. */
#include <assert.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "common/spec_file.h"
#include "common/spec_print.h"
#include "proto/jobspec.pb-c.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static ProtobufCMessage *read_text(const char *text, size_t bytes, const char *set, struct tally_error *err)
{
    struct spec_file *f = NULL;
    ProtobufCMessage *msg = NULL;
    err->message[0] = '\0';
    tally_status status = spec_open_text("fuzz", text, bytes, &f, err);
    if (status == TALLY_OK && set)
        status = spec_set(f, set, err);
    if (status == TALLY_OK)
        status = spec_read(f, &tally__v1__job_spec__descriptor, &msg, err);
    if (status != TALLY_OK)
        assert(err->message[0] != '\0' && !msg);
    spec_close(f);
    return msg;
}

static void check_same(const ProtobufCMessage *a, const ProtobufCMessage *b)
{
    size_t bytes = protobuf_c_message_get_packed_size(a);
    assert(bytes == protobuf_c_message_get_packed_size(b));
    uint8_t *left = malloc(bytes + 1);
    uint8_t *right = malloc(bytes + 1);
    assert(left && right);
    protobuf_c_message_pack(a, left);
    protobuf_c_message_pack(b, right);
    assert(memcmp(left, right, bytes) == 0);
    free(left);
    free(right);
}

/* The bytes before the first zero byte, if there is one, are a --set for the rest. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct tally_error err;
    const uint8_t *zero = size > 0 ? memchr(data, 0, size) : NULL;
    const char *set = zero ? (const char *)data : NULL;
    const char *text = zero ? (const char *)zero + 1 : (const char *)data;
    size_t bytes = size - (size_t)((const uint8_t *)text - data);
    ProtobufCMessage *msg = read_text(text, bytes, set, &err);
    if (!msg)
        return 0;
    char *yaml = NULL;
    assert(spec_yaml_text(msg, 0, &yaml, &err) == TALLY_OK);
    ProtobufCMessage *again = read_text(yaml, strlen(yaml), NULL, &err);
    assert(again);
    check_same(msg, again);
    protobuf_c_message_free_unpacked(again, NULL);
    free(yaml);
    json_t *json = NULL;
    assert(spec_to_json(msg, SPEC_PRINT_DEFAULTS, &json, &err) == TALLY_OK);
    json_decref(json);
    assert(spec_fill_defaults(msg, &err) == TALLY_OK);
    assert(spec_check_message("fuzz", msg, NULL, &err) == TALLY_OK);
    protobuf_c_message_free_unpacked(msg, NULL);
    return 0;
}
