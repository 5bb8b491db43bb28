#ifndef SERVER_STORE_H
#define SERVER_STORE_H
/*
 * The coordinator's truth on disk: jobs and their events in SQLite, in `DIR/jobs.sqlite`. One writer thread, to which
 * the loop hands writes in order; what waits together is committed together, and each write is told when it is durable.
 * Reads run on whatever thread asks.
 *
 * R1  Writes are applied in the order in which they were given: what is on disk is always a prefix of the coordinator's
 * history. R2  After a write has failed every later one fails with the same reason, so that R1 holds (a full disk may
 * have room again later). R3  One process has a state directory: `DIR/lock` is locked while the store is open.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>

#include "common/error.h"
#include "proto/jobs.pb-c.h"
#include "server/event_batch.h"

struct store;

/*
 * Makes the directory if it is missing, locks it, brings the schema up to date and starts the writer. Errors name the
 * directory: TALLY_EEXIST: another coordinator has it; TALLY_EUNSUPPORTED: a newer Tally wrote it; TALLY_EIO: it cannot
 * be written, or is damaged.
 */
tally_status store_open(uv_loop_t *loop, const char *directory, struct store **ret_store, struct tally_error *err);

/* Writes what was given, calls what is to be called, then frees; on_closed(user) runs on the loop. Does not wait for
 * the disk itself. */
void store_close(struct store *store, void (*on_closed)(void *user), void *user);

/* How often this store has been opened, this time included: the coordinator's epoch. */
uint64_t store_epoch(const struct store *store);
/* The id for the first job that is made now: none of this or any earlier epoch had it. */
uint64_t store_next_job(const struct store *store);

/* ---- writing: on the loop's thread ---- */

/* On the loop's thread, once for each write that was taken. err: TALLY_OK when it is durable. */
typedef void (*store_done)(const struct tally_error *err, void *user);

/* A new job. Everything is copied; the job's spec is taken from `spec`, not from `job`. done may be NULL. TALLY_ENOMEM:
 * too much waits for the disk. */
tally_status store_insert(struct store *store, const Tally__V1__Job *job, const char *request_id,
                          const Tally__V1__JobSpec *spec, const Tally__V1__DataFacts *facts, struct event_batch *batch,
                          store_done done, void *user, struct tally_error *err);

/* job's new record (NULL: unchanged) and further events (NULL: none), together. Takes a reference on batch. job_id: of
 * both. */
tally_status store_update(struct store *store, uint64_t job_id, const Tally__V1__Job *job, struct event_batch *batch,
                          store_done done, void *user, struct tally_error *err);

/* ---- reading: any thread; waits for the disk ---- */

struct store_job {
    uint64_t id;
    const char *request_id;
    Tally__V1__Job *job; /* without spec; the callee takes it (protobuf_c_message_free_unpacked) */
    uint64_t last_seq;   /* of its events; 0: none */
};

/* Calls each(job, user) for every job, oldest first, until it returns other than TALLY_OK, which is then returned. */
tally_status store_load(struct store *store,
                        tally_status (*each)(const struct store_job *job, void *user, struct tally_error *err),
                        void *user, struct tally_error *err);

/* ret_facts may be NULL. The caller frees both. TALLY_ENOTFOUND: no such job. */
tally_status store_read_spec(struct store *store, uint64_t job, Tally__V1__JobSpec **ret_spec,
                             Tally__V1__DataFacts **ret_facts, struct tally_error *err);

/*
 * The durable events behind `after`: batches in order, the first of which may begin before it; as many as hold
 * max_bytes, at least one if there is one. *ret_first: a list by `next`, with the caller's references; NULL: none.
 */
tally_status store_read_events(struct store *store, uint64_t job, uint64_t after, size_t max_bytes,
                               struct event_batch **ret_first, struct tally_error *err);
#endif
