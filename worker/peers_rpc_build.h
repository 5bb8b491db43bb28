#ifndef WORKER_PEERS_RPC_BUILD_H
#define WORKER_PEERS_RPC_BUILD_H
/* What peers_rpc.c (who is connected, sending), peers_inlet.c (receiving) and peers_wait.c (waiting, words) share. The
 * design is told in peers_rpc.c. */
#include "common/limits.h"
#include "worker/peers_rpc.h"
#include "worker/wait.h"

#define PART_FLOATS (TALLY_SLICE_MAX_BYTES / sizeof(float)) /* of a tensor, in a message */

/* A tensor that was given to the stream. */
struct peers_parcel {
    struct peers_rpc *p;
    atomic_uint parts;            /* not released; 0: free */
    atomic_uint_least64_t ticket; /* of data that is the caller's; 0: it is `packed` */
    float *packed;                /* the outlet's pack_floats; NULL where nothing is ever packed */
};

struct peers_outlet {
    struct peers_rpc *p;
    uint32_t rank;
    uint32_t room;      /* parcels; 0: nothing is sent there */
    size_t max_floats;  /* of a tensor */
    size_t pack_floats; /* of one that is not sent from where it lies */
    struct peers_parcel *parcels;
    struct rpc_channel *channel;
    struct rpc_stream *stream;
    atomic_uint credits;
    bool ended; /* under the mutex */
};

enum peers_letter_state { LETTER_EMPTY, LETTER_FILLS, LETTER_FULL };

struct peers_letter {
    atomic_int state; /* EMPTY: the data thread's; FULL: the compute thread's */
    struct peer_tensor tensor;
    size_t floats; /* here */
    uint32_t parts;
    struct rpc_payload **payloads; /* the inlet's parts_max */
};

struct peers_inlet {
    struct peers_rpc *p;
    uint32_t rank;
    uint32_t room; /* letters; 0: nothing comes from there */
    uint32_t parts_max;
    struct peers_letter *letters;
    uint64_t *next;               /* by edge: the number of the first tensor that was not taken up yet (data thread) */
    struct peers_letter *filling; /* NULL: none (data thread) */
    struct rpc_stream *stream;    /* set before the first letter is full */
    bool attached;
};

enum peers_wait_kind { WAIT_NOTHING, WAIT_TENSOR, WAIT_ROOM, WAIT_FLUSH };

struct peers_looking {
    struct peers_rpc *p;
    enum peers_wait_kind kind;
    uint32_t rank;
    struct peer_tensor tensor;
    uint64_t ticket;
    int64_t since_ns;
};

struct peers_rpc {
    struct peers peers;
    struct peers_listener listener;
    struct peers_rpc_options options; /* names: ours */
    struct rpc_queue *queue;
    uint32_t ranks;
    char **names;
    char who[TALLY_NODE_NAME_MAX + 32]; /* this worker, as sentences begin */
    struct peers_outlet *outlets;       /* by rank */
    struct peers_inlet *inlets;
    uint64_t tickets;
    atomic_uint_least64_t step;

    struct wait_point wait;
    unsigned live_streams; /* outlets'; under the wait's mutex */
    atomic_uint pending;   /* parts given to streams and not released */
    bool connecting;       /* the task was posted */
    atomic_bool connected, disconnected, done, closing;
    struct rpc_task connect_task, disconnect_task;

    pthread_mutex_t activity_mutex; /* for people */
    struct peers_looking looking;
};

static inline struct peers_rpc *peers_rpc_of(struct peers *peers)
{
    return (struct peers_rpc *)peers; /* its first member */
}

static inline uint32_t peers_rpc_stage(const struct peers_rpc *p, uint32_t rank)
{
    return rank / p->options.plan->mesh.tensor % p->options.plan->mesh.pipeline;
}

tally_status peers_rpc_no_memory(struct tally_error *err);
/* Floats of the largest tensor from one stage to another; packed: of those that have padding between rows. */
size_t peers_rpc_largest(const struct plan *plan, uint32_t from, uint32_t to, bool packed);
/* The stream between this worker and a rank has ended; unless it was to, that fails the job. Data thread. */
void peers_rpc_lost(struct peers_rpc *p, uint32_t rank, bool outgoing, const struct tally_error *end);

/* ---- peers_wait.c ---- */

/* "activation 3 of step 41" */
const char *peers_tensor_text(const struct peer_tensor *tensor, char *text, size_t size);
/* "edge 2, the output of conv1" */
const char *peers_edge_text(const struct peers_rpc *p, uint32_t edge, char *text, size_t size);
/* "w1 (stage 0)" */
const char *peers_rank_text(const struct peers_rpc *p, uint32_t rank, char *text, size_t size);
/* Are these the same name? */
bool peers_same_tensor(const struct peer_tensor *a, const struct peer_tensor *b);
/* The full letter with this tensor, NULL: it is not here yet. */
struct peers_letter *peers_find_letter(const struct peers_inlet *inlet, const struct peer_tensor *tensor);
/* A free parcel; NULL: none. */
struct peers_parcel *peers_find_parcel(const struct peers_outlet *outlet);
/* A wait of the thread that computes. */
tally_status peers_rpc_wait(const struct peers_looking *looking, struct tally_error *err);

/* ---- peers_inlet.c ---- */

/* What comes from a rank of another stage: nothing is made where the plan sends nothing here. */
tally_status peers_inlet_make(struct peers_rpc *p, uint32_t rank, struct tally_error *err);
void peers_inlet_free(struct peers_inlet *inlet);
/* struct peers_listener's */
tally_status peers_inlet_open(struct peers_listener *listener, struct rpc_stream *stream, const char *from,
                              void **ret_inlet, struct tally_error *err);
tally_status peers_inlet_message(void *inlet, const struct rpc_message *message, struct tally_error *err);
void peers_inlet_end(void *inlet, const struct tally_error *end);
/* struct peers' receive */
tally_status peers_inlet_receive(struct peers *peers, uint32_t rank, struct peer_tensor *tensor, float *data,
                                 struct tally_error *err);
#endif
