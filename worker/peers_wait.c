/* What a stage waits for, and how it says so. */
#include <inttypes.h>
#include <stdio.h>

#include "common/clock.h"
#include "worker/peers_rpc_build.h"

/* ---- words ---- */

/* "activation 3 of step 41" */
const char *peers_tensor_text(const struct peer_tensor *t, char *text, size_t size)
{
    snprintf(text, size, "%s %" PRIu32 " of %s %" PRIu64,
             t->direction == TALLY__V1__DIRECTION__BACKWARD ? "gradient" : "activation", t->micro_batch,
             t->evaluation ? "the evaluation at version" : "step", t->step);
    return text;
}

/* "edge 2, the output of conv1" */
const char *peers_edge_text(const struct peers_rpc *p, uint32_t edge, char *text, size_t size)
{
    const struct plan *plan = p->options.plan;
    int32_t layer = plan->tensors[plan->edges[edge].tensor].layer;
    snprintf(text, size, "edge %" PRIu32 ", the output of %.100s", edge,
             layer >= 0 ? plan->model->layers[layer].name : "the input");
    return text;
}

const char *peers_rank_text(const struct peers_rpc *p, uint32_t rank, char *text, size_t size)
{
    snprintf(text, size, "%s (stage %" PRIu32 ")", p->names[rank], peers_rpc_stage(p, rank));
    return text;
}

/* ---- waiting ---- */

bool peers_same_tensor(const struct peer_tensor *a, const struct peer_tensor *b)
{
    return a->step == b->step && a->evaluation == b->evaluation && a->micro_batch == b->micro_batch &&
           a->edge == b->edge && a->direction == b->direction;
}

struct peers_letter *peers_find_letter(const struct peers_inlet *in, const struct peer_tensor *tensor)
{
    for (uint32_t i = 0; i < in->room; i++)
        if (atomic_load(&in->letters[i].state) == LETTER_FULL && peers_same_tensor(&in->letters[i].tensor, tensor))
            return &in->letters[i];
    return NULL;
}

struct peers_parcel *peers_find_parcel(const struct peers_outlet *out)
{
    for (uint32_t i = 0; i < out->room; i++)
        if (atomic_load(&out->parcels[i].parts) == 0)
            return &out->parcels[i];
    return NULL;
}

static bool has_left(const struct peers_rpc *p, uint64_t ticket)
{
    if (atomic_load(&p->pending) == 0)
        return true;
    for (uint32_t r = 0; r < p->ranks; r++)
        for (uint32_t i = 0; i < p->outlets[r].room; i++) {
            const struct peers_parcel *parcel = &p->outlets[r].parcels[i];
            uint64_t its = atomic_load(&parcel->ticket);
            if (atomic_load(&parcel->parts) > 0 && (ticket == UINT64_MAX || (its > 0 && its <= ticket)))
                return false;
        }
    return true;
}

static bool is_met(const void *context)
{
    const struct peers_looking *l = context;
    switch (l->kind) {
    case WAIT_TENSOR:
        return peers_find_letter(&l->p->inlets[l->rank], &l->tensor) != NULL;
    case WAIT_ROOM:
        return atomic_load(&l->p->outlets[l->rank].credits) > 0 && peers_find_parcel(&l->p->outlets[l->rank]);
    case WAIT_FLUSH:
        return has_left(l->p, l->ticket);
    case WAIT_NOTHING:
        break;
    }
    return true;
}

static void looking_text(const void *context, char *text, size_t size)
{
    const struct peers_looking *l = context;
    char tensor[96] = "", edge[160] = "", rank[128] = "";
    if (l->kind == WAIT_TENSOR || l->kind == WAIT_ROOM) {
        peers_tensor_text(&l->tensor, tensor, sizeof tensor);
        peers_edge_text(l->p, l->tensor.edge, edge, sizeof edge);
        peers_rank_text(l->p, l->rank, rank, sizeof rank);
    }
    switch (l->kind) {
    case WAIT_TENSOR:
        snprintf(text, size, "%s from %s (%s)", tensor, rank, edge);
        break;
    case WAIT_ROOM:
        snprintf(text, size, "room for %s at %s (%s)", tensor, rank, edge);
        break;
    default:
        snprintf(text, size, "the last activations and gradients to leave");
    }
}

static void set_looking(struct peers_rpc *p, const struct peers_looking *looking)
{
    pthread_mutex_lock(&p->activity_mutex);
    p->looking = *looking;
    pthread_mutex_unlock(&p->activity_mutex);
}

/* A wait of the thread that computes. */
tally_status peers_rpc_wait(const struct peers_looking *looking, struct tally_error *err)
{
    struct peers_rpc *p = looking->p;
    if (is_met(looking))
        return TALLY_OK;
    struct peers_looking told = *looking;
    told.since_ns = tally_now_ns();
    set_looking(p, &told);
    struct wait_for what = {.is_met = is_met,
                            .text = looking_text,
                            .context = looking,
                            .who = p->who,
                            .limit_ms = p->options.wait_ms,
                            .outside = looking->kind != WAIT_TENSOR};
    tally_status status = wait_until(&p->wait, &what, p->options.on_data_thread, err);
    set_looking(p, &(struct peers_looking){.p = p});
    return status;
}

void peers_rpc_activity(struct peers_rpc *p, char *text, size_t size)
{
    char what[512];
    pthread_mutex_lock(&p->activity_mutex);
    struct peers_looking looking = p->looking;
    pthread_mutex_unlock(&p->activity_mutex);
    if (size)
        text[0] = 0;
    if (looking.kind == WAIT_NOTHING)
        return;
    looking_text(&looking, what, sizeof what);
    int64_t waited_ms = (tally_now_ns() - looking.since_ns) / 1000000;
    if (waited_ms < 1000)
        snprintf(text, size, "waits for %s", what);
    else
        snprintf(text, size, "has waited %.1f s for %s", (double)waited_ms / 1000, what);
}
