#ifndef SERVER_EVENT_BATCH_H
#define SERVER_EVENT_BATCH_H
/*
 * A job's events in packed pieces. A fast job makes thousands of steps a second: each step is packed once, straight
 * from the shard's record, and these bytes are what is stored and what is sent to watchers. The bytes of a batch are
 * those of a packed `Events` message, so batches one behind the other are one, too.
 */
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "common/error.h"
#include "proto/jobs.pb-c.h"

/* Events first..last of one job, without a gap. Not changed once it is shared. */
struct event_batch {
    atomic_uint references;
    uint64_t first, last;     /* seq; first > last: none yet */
    struct event_batch *next; /* the owner's list */
    size_t bytes, room;
    uint8_t *data;
};

/* With one reference, the caller's; its first event will be `first`. NULL: out of memory. */
struct event_batch *event_batch_new(uint64_t first);
/* Of stored bytes: takes a copy. */
struct event_batch *event_batch_from(uint64_t first, uint64_t last, const void *data, size_t bytes);
/* Any thread. unref takes NULL and returns NULL. */
struct event_batch *event_batch_ref(struct event_batch *batch);
struct event_batch *event_batch_unref(struct event_batch *batch);

/* Appends event, setting its seq to the next one. TALLY_ENOMEM: nothing was appended. */
tally_status event_batch_add(struct event_batch *batch, Tally__V1__Event *event, struct tally_error *err);

/* The same for a StepDone, without the message: byte for byte what event_batch_add would append. */
tally_status event_batch_add_step(struct event_batch *batch, int64_t unix_ms, const Tally__V1__StepDone *step,
                                  struct tally_error *err);

/* The part of the batch behind event `after`. Returns its bytes (0: none; UINT64_MAX's worth is never there) and sets
 * *ret_data into the batch. */
size_t event_batch_after(const struct event_batch *batch, uint64_t after, const uint8_t **ret_data);

/*
 * A message whose packed bytes are these: *message is to be packed at once (they are not copied, and *field must stay).
 * protobuf-c packs fields that it does not know as they are; so they need not be unpacked to be sent. bytes: of a batch
 * or a part of one, at least 1.
 */
void event_batch_message(const uint8_t *data, size_t bytes, Tally__V1__Events *message,
                         ProtobufCMessageUnknownField *field);
#endif
