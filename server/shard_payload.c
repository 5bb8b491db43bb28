#include "server/shard_sum.h"

static size_t payload_bytes(const void *gradient)
{
    return rpc_payload_bytes(gradient);
}

static void *payload_ref(void *gradient)
{
    return rpc_payload_ref(gradient);
}

static void payload_unref(void *gradient)
{
    rpc_payload_unref(gradient);
}

static void payload_reader_init(struct rpc_payload_reader *reader, const void *gradient)
{
    rpc_payload_reader_init(reader, gradient);
}

const struct shard_gradient_ops shard_payload_ops = {
    .bytes = payload_bytes,
    .ref = payload_ref,
    .unref = payload_unref,
    .reader_init = payload_reader_init,
    .reader_next = rpc_payload_reader_next,
};
