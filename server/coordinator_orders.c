#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/coordinator_internal.h"

/* ---- the gang ---- */

static char **name_list(struct member *const *members, size_t count)
{
    char **names = calloc(count, sizeof *names);
    for (size_t i = 0; names && i < count; i++) {
        names[i] = strdup(members[i]->name);
        if (names[i])
            continue;
        while (i > 0)
            free(names[--i]);
        free(names);
        names = NULL;
    }
    return names;
}

static struct gang_node *take_nodes(struct job *job, struct member *const *members, size_t count)
{
    struct gang_node *nodes = calloc(count, sizeof *nodes);
    for (size_t i = 0; nodes && i < count; i++) {
        nodes[i].member = members[i];
        snprintf(nodes[i].name, sizeof nodes[i].name, "%s", members[i]->name);
        snprintf(nodes[i].address, sizeof nodes[i].address, "%s", members[i]->address);
        members[i]->job = job->record->id;
        members[i]->activity[0] = '\0'; /* what it said before is not about this job */
    }
    return nodes;
}

static Tally__V1__Gang *gang_message(const struct gang *gang, const struct gang_size *size)
{
    Tally__V1__Gang *message = malloc(sizeof *message);
    if (!message)
        return NULL;
    tally__v1__gang__init(message);
    message->data = gang->data;
    message->pipeline = size->pipeline;
    message->tensor = size->tensor;
    message->isa = strdup(isa_text(gang->isa));
    message->workers = name_list(gang->workers, gang->worker_count);
    message->n_workers = message->workers ? gang->worker_count : 0;
    message->shards = name_list(gang->shards, gang->shard_count);
    message->n_shards = message->shards ? gang->shard_count : 0;
    if (message->isa && message->workers && message->shards)
        return message;
    if (!message->isa)
        message->isa = (char *)(uintptr_t)protobuf_c_empty_string;
    tally__v1__gang__free_unpacked(message, NULL);
    return NULL;
}

tally_status job_take_gang(struct job *job, const struct gang *gang, struct tally_error *err)
{
    Tally__V1__Gang *message = gang_message(gang, &job->size);
    struct gang_node *workers = message ? take_nodes(job, gang->workers, gang->worker_count) : NULL;
    struct gang_node *shards = workers ? take_nodes(job, gang->shards, gang->shard_count) : NULL;
    if (!shards) {
        for (size_t i = 0; workers && i < gang->worker_count; i++)
            gang->workers[i]->job = 0;
        free(workers);
        tally__v1__gang__free_unpacked(message, NULL);
        return tally_fail(err, TALLY_ENOMEM, "no memory for a gang of %zu workers", gang->worker_count);
    }
    tally__v1__gang__free_unpacked(job->record->gang, NULL);
    job->record->gang = message;
    job->record->generation++;
    job->workers = workers;
    job->worker_count = gang->worker_count;
    job->shards = shards;
    job->shard_count = gang->shard_count;
    return TALLY_OK;
}

/* ---- orders ---- */

static void give(struct gang_node *node, const Tally__V1__Order *order)
{
    /* One that was lost since brings its own event. */
    if (!node->member)
        return;
    node->given = true;
    cluster_send(node->member, order);
}

void job_open_shards(struct job *job)
{
    Tally__V1__OpenJob open = TALLY__V1__OPEN_JOB__INIT;
    Tally__V1__Order order = TALLY__V1__ORDER__INIT;
    order.body_case = TALLY__V1__ORDER__BODY_OPEN_JOB;
    order.open_job = &open;
    open.job = job->record->id;
    open.generation = job->record->generation;
    open.spec = job->spec;
    open.facts = job->facts;
    open.shards = (uint32_t)job->shard_count;
    open.workers = (uint32_t)job->worker_count;
    for (size_t i = 0; i < job->shard_count; i++) {
        open.shard = (uint32_t)i;
        give(&job->shards[i], &order);
    }
}

void job_assign_workers(struct job *job)
{
    char **addresses = calloc(job->shard_count + job->worker_count, sizeof *addresses);
    if (!addresses)
        return; /* no worker starts: the phase's deadline says so */
    for (size_t i = 0; i < job->shard_count; i++)
        addresses[i] = job->shards[i].address;
    for (size_t i = 0; i < job->worker_count; i++)
        addresses[job->shard_count + i] = job->workers[i].address;
    Tally__V1__Assign assign = TALLY__V1__ASSIGN__INIT;
    Tally__V1__Order order = TALLY__V1__ORDER__INIT;
    order.body_case = TALLY__V1__ORDER__BODY_ASSIGN;
    order.assign = &assign;
    assign.job = job->record->id;
    assign.generation = job->record->generation;
    assign.spec = job->spec;
    assign.facts = job->facts;
    assign.gang = job->record->gang;
    assign.n_shard_addresses = job->shard_count;
    assign.shard_addresses = addresses;
    assign.n_peer_addresses = job->worker_count;
    assign.peer_addresses = addresses + job->shard_count;
    for (size_t i = 0; i < job->worker_count; i++) {
        assign.rank = (uint32_t)i;
        give(&job->workers[i], &order);
    }
    free(addresses);
}

void job_end_nodes(struct job *job, struct gang_node *nodes, size_t count)
{
    Tally__V1__EndJob end = TALLY__V1__END_JOB__INIT;
    Tally__V1__Order order = TALLY__V1__ORDER__INIT;
    order.body_case = TALLY__V1__ORDER__BODY_END_JOB;
    order.end_job = &end;
    end.job = job->record->id;
    end.generation = job->record->generation;
    end.reason = job->record->reason;
    for (size_t i = 0; i < count; i++) {
        struct gang_node *node = &nodes[i];
        if (node->told || node->ended)
            continue;
        node->told = true;
        if (!node->given) {
            node->ended = true;
            if (node->member)
                node->member->job = 0;
        } else if (node->member) {
            cluster_send(node->member, &order);
        } else {
            node->ended = true;
        }
    }
}

bool job_nodes_ended(const struct gang_node *nodes, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (!nodes[i].ended)
            return false;
    }
    return true;
}

/* ---- who is waited for ---- */

struct list {
    char *text;
    size_t size, used, named, left_out;
};

#define NAMED_MAX 4

static void list_node(struct list *list, const char *role, const struct gang_node *node)
{
    if (list->named == NAMED_MAX || list->used >= list->size) {
        list->left_out++;
        return;
    }
    const char *activity = node->member ? node->member->activity : "";
    int wrote = snprintf(list->text + list->used, list->size - list->used, "%s%s %s%s%s%s", list->named > 0 ? ", " : "",
                         role, node->name, activity[0] ? " (" : "", activity, activity[0] ? ")" : "");
    list->used += wrote > 0 ? (size_t)wrote : 0;
    list->named++;
}

void job_waits_text(const struct job *job, char *text, size_t size)
{
    struct list list = {.text = text, .size = size};
    bool draining = job->phase == JOB_STOP_DRAINING || job->phase == JOB_FAIL_DRAINING;
    text[0] = '\0';
    for (size_t i = 0; i < job->shard_count; i++) {
        const struct gang_node *shard = &job->shards[i];
        if ((job->phase == JOB_OPENING && !shard->ready) ||
            (job->phase == JOB_TRAINING && i == 0 && job->reported < job->batches.steps))
            list_node(&list, "shard", shard);
    }
    for (size_t i = 0; i < job->worker_count; i++) {
        const struct gang_node *worker = &job->workers[i];
        if ((job->phase == JOB_ASSIGNING && !worker->ready) || (job->phase == JOB_TRAINING && !worker->finished) ||
            (draining && !worker->ended))
            list_node(&list, "worker", worker);
    }
    if (list.left_out > 0 && list.used < size)
        snprintf(text + list.used, size - list.used, " and %zu more", list.left_out);
    else if (list.named == 0 && job->phase == JOB_TRAINING)
        eval_sum_waits(job->evals, text, size);
}
