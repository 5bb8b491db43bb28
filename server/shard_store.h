#ifndef SERVER_SHARD_STORE_H
#define SERVER_SHARD_STORE_H
/*
 * One job's slices at one shard: weights and momentum in two buffers each, the gradients that wait for their siblings
 * in the step's tree, and the rule that every leaf counts once. Nothing here knows of streams; everything runs on the
 * shard's data thread, but for shard_store_release.
 */
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/error.h"
#include "kernels/kernels.h"
#include "model/batches.h"
#include "model/tree.h"
#include "proto/parameters.pb-c.h"
#include "server/shard_sum.h"

/* A range of the flat vector, in floats. */
struct shard_range {
    size_t offset, count;
};

/* How whoever releases a buffer tells the data thread, which sets wanted while something waits for a buffer. Outlives
 * every store, until shard_wake_settle returns. */
struct shard_wake {
    atomic_bool wanted;
    atomic_uint releasing;    /* threads inside shard_store_release */
    void (*wake)(void *user); /* any thread */
    void *user;
};

/* Nothing is borrowed from any store: waits until the last shard_store_release (some instructions of another thread) is
 * done with wake. */
void shard_wake_settle(struct shard_wake *wake);

struct shard_store_config {
    uint64_t job, generation;
    uint64_t start_version;           /* of the first weights; no momentum exists then */
    uint32_t first_slice;             /* index in the model of slices[0] */
    const struct shard_range *slices; /* contiguous; copied */
    uint32_t slice_count;             /* may be 0: a shard without slices */
    struct batches batches;
    struct kernel_sgd sgd;          /* first is the store's business */
    const struct kernels *kernels;  /* of a backend in host memory */
    struct kernel_backend *backend; /* where weights and momentum are */
    struct shard_sum *sum;          /* lent; may be shared by stores of one thread */
    const struct shard_gradient_ops *gradients;
    struct shard_wake *wake;
};

struct shard_store;

/* Errors: TALLY_ENOMEM. */
tally_status shard_store_new(const struct shard_store_config *config, struct shard_store **ret_store,
                             struct tally_error *err);
/* NULL is allowed. No buffer may be borrowed. */
void shard_store_free(struct shard_store *store);

/* The first weights, for whoever fills them in: floats [*ret_offset, *ret_offset + *ret_count) of the flat vector. NULL
 * where the shard has no slices. */
float *shard_store_first_weights(struct shard_store *store, size_t *ret_offset, size_t *ret_count);

/* A gang's later generation: what is held of the step stays, as a leaf's gradient does not depend on who computed it.
 */
void shard_store_set_generation(struct shard_store *store, uint64_t generation);

/* ---- pushes ---- */

struct shard_push {
    uint64_t generation, step;
    struct tree_node leaves;
    uint32_t slice; /* index in the model */
    double weight, loss_sum, correct;
    void *gradient; /* lent; a reference is taken where it must be kept */
};

enum shard_taken {
    SHARD_HELD,     /* waits for the rest of its step's tree */
    SHARD_UPDATED,  /* it was the last one: the slice has new weights */
    SHARD_WAITS,    /* it was the last one, but the buffer for the new weights is still being sent: shard_store_retry */
    SHARD_REPEATED, /* ignored: its leaves are held, or its step has been applied */
    SHARD_REFUSED,
    SHARD_FAILED, /* out of memory: the job cannot go on */
};

struct shard_refusal {
    Tally__V1__Refusal__Code code;
    char reason[200];
};

/* A slice that has been updated, with the sums over the step's tree. */
struct shard_update {
    uint32_t slice;
    uint64_t version; /* now: the step that was applied */
    double weight, loss_sum, correct;
};

/*
 * Takes one push. The first of these that holds decides: another generation, a foreign slice or a step that the job has
 * not: refused. A step that this slice has been given: repeated. A later step than the one being summed, no node of the
 * step's tree, another length than the slice's, a weight that is negative, not finite or not the one which the same
 * node brought before: refused. Its leaves are held: repeated. Otherwise it is taken, and replaces what is held of its
 * leaves. *ret_update is written with SHARD_UPDATED, *ret_refusal with SHARD_REFUSED, *err with SHARD_FAILED.
 */
enum shard_taken shard_store_push(struct shard_store *store, const struct shard_push *push,
                                  struct shard_update *ret_update, struct shard_refusal *ret_refusal,
                                  struct tally_error *err);

/* Updates one of the slices whose last push was answered SHARD_WAITS, if its buffer is free now. false: none. */
bool shard_store_retry(struct shard_store *store, struct shard_update *ret_update);

/* While on, slices that are complete wait as if their buffers were in use. */
void shard_store_hold_updates(struct shard_store *store, bool on);

/* ---- what it holds ---- */

struct shard_counts {
    uint64_t taken, repeated, refused; /* pushes */
};

uint64_t shard_store_generation(const struct shard_store *store);
/* Every slice is at this version or one later. Without slices: the job's last. */
uint64_t shard_store_version(const struct shard_store *store);
/* Every slice still holds this version, and all up to shard_store_version. */
uint64_t shard_store_oldest(const struct shard_store *store);
uint64_t shard_store_slice_version(const struct shard_store *store, uint32_t slice);
struct shard_counts shard_store_counts(const struct shard_store *store);
size_t shard_store_parameter_bytes(const struct shard_store *store);
/* Gradients that wait for their siblings or for a buffer. */
size_t shard_store_held_bytes(const struct shard_store *store);
/* Of the step being summed; 0 behind the last one. */
uint32_t shard_store_leaves(const struct shard_store *store);
/* Slices that wait for a buffer, and how many sends hold the buffer of the first of them. */
uint32_t shard_store_waiting(const struct shard_store *store, uint32_t *ret_slice, unsigned *ret_readers);
/* What it waits for, for a person: "step 41: 3 of 80 slices updated, slice 7 waits for micro-batch 2". Returns text. */
const char *shard_store_describe(const struct shard_store *store, char *text, size_t size);
/* The first slice behind the others, the first leaf that it lacks, and the step's leaves. false: it waits for none. */
struct shard_missing {
    uint32_t slice, leaves, leaf;
};
bool shard_store_missing(const struct shard_store *store, struct shard_missing *ret_missing);

/* ---- reading weights ---- */

/*
 * The weights of a slice at a version that is held, which stay as they are until shard_store_release(*ret_lease). NULL:
 * the version is not held. The data thread.
 */
const float *shard_store_borrow(struct shard_store *store, uint32_t slice, uint64_t version, size_t *ret_count,
                                void **ret_lease);
/* Any thread. */
void shard_store_release(void *lease);
/* Nothing is borrowed. */
bool shard_store_idle(const struct shard_store *store);
#endif
