#include "worker/control.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cluster/node.h"
#include "common/log.h"
#include "common/message_copy.h"
#include "kernels/kernels.h"
#include "proto/rpc.h"
#include "worker/job.h"
#include "worker/peers_service.h"

#define DRAIN_MS 200 /* nothing that a worker serves takes longer */

struct control {
    uv_loop_t *loop;
    char *name, *backend;
    char address[RPC_ADDRESS_MAX];
    struct rpc_queue *queue;
    struct data_thread *thread;
    struct peers_service *peers;
    struct rpc_server *server;
    struct node *node;
    uv_timer_t last; /* when nothing is left that could call */
    struct job *job; /* runs, or ends */
    bool answer;     /* with Ended, when the job has ended */
    uint64_t answer_generation;
    Tally__V1__Assign *next; /* to be started when the job has ended; NULL: none */
    bool serving, leaving, node_closed, server_stopped;
    tally_status status;
    struct tally_error failure;
};

static void start_next(struct control *c);

/* ---- to the coordinator ---- */

static void send_message(struct control *c, const Tally__V1__NodeMessage *message)
{
    struct tally_error err;
    if (!c->node)
        return;
    tally_status status = node_send(c->node, message, &err);
    if (status && status != TALLY_EUNAVAIL) /* not registered: the job is being dropped */
        log_error("a report was lost: %s", err.message);
}

static void send_ended(struct control *c, uint64_t job, uint64_t generation)
{
    Tally__V1__Ended ended = TALLY__V1__ENDED__INIT;
    ended.job = job;
    ended.generation = generation;
    Tally__V1__NodeMessage message = TALLY__V1__NODE_MESSAGE__INIT;
    message.body_case = TALLY__V1__NODE_MESSAGE__BODY_ENDED;
    message.ended = &ended;
    send_message(c, &message);
}

static void send_failed(struct control *c, const Tally__V1__Assign *assign, const char *reason)
{
    Tally__V1__JobFailed failed = TALLY__V1__JOB_FAILED__INIT;
    failed.job = assign->job;
    failed.generation = assign->generation;
    failed.reason = (char *)reason;
    Tally__V1__NodeMessage message = TALLY__V1__NODE_MESSAGE__INIT;
    message.body_case = TALLY__V1__NODE_MESSAGE__BODY_JOB_FAILED;
    message.job_failed = &failed;
    send_message(c, &message);
}

/* ---- leaving ---- */

static void finish(uv_timer_t *timer)
{
    struct control *c = timer->data;
    rpc_server_free(c->server);
    rpc_queue_free(c->queue);
    data_thread_stop(c->thread);
    peers_service_free(c->peers);
    uv_close((uv_handle_t *)timer, NULL);
}

/* Not at once: this is inside a callback of the queue that goes. */
static void leave_further(struct control *c)
{
    if (c->leaving && !c->job && c->node_closed && c->server_stopped)
        uv_timer_start(&c->last, finish, 0, 0);
}

static void on_node_closed(void *user)
{
    struct control *c = user;
    c->node_closed = true;
    leave_further(c);
}

static void on_server_stopped(void *user)
{
    struct control *c = user;
    c->server_stopped = true;
    leave_further(c);
}

void control_leave(struct control *c)
{
    if (c->leaving)
        return;
    c->leaving = true;
    if (c->next)
        tally__v1__assign__free_unpacked(c->next, NULL);
    c->next = NULL;
    if (c->job)
        job_end(c->job);
    struct node *node = c->node;
    c->node = NULL;
    node_close(node, on_node_closed, c);
    rpc_server_stop(c->server, DRAIN_MS, on_server_stopped, c);
}

/* ---- the job ---- */

static void on_report(struct job *job, const Tally__V1__NodeMessage *message, void *user)
{
    struct control *c = user;
    if (message->body_case == TALLY__V1__NODE_MESSAGE__BODY_JOB_FAILED)
        log_warn("job %" PRIu64 " failed: %s", job_id(job), message->job_failed->reason);
    else if (message->body_case == TALLY__V1__NODE_MESSAGE__BODY_FINISHED)
        log_info("job %" PRIu64 " has run its last step", job_id(job));
    send_message(c, message);
}

static void on_closed(struct job *job, void *user)
{
    struct control *c = user;
    if (c->answer)
        send_ended(c, job_id(job), c->answer_generation);
    c->answer = false;
    c->job = NULL;
    start_next(c);
    leave_further(c);
}

static void start(struct control *c, const Tally__V1__Assign *assign)
{
    static const struct job_events events = {.on_report = on_report, .on_closed = on_closed};
    struct job_environment environment = {
        .worker = c->name, .backend = c->backend, .thread = c->thread, .peers = c->peers, .queue = c->queue};
    struct tally_error err;
    log_info("takes up job %" PRIu64 ", generation %" PRIu64 ", as rank %u", assign->job, assign->generation,
             assign->rank);
    if (job_start(&environment, assign, &events, c, &c->job, &err))
        send_failed(c, assign, err.message);
}

static void start_next(struct control *c)
{
    Tally__V1__Assign *next = c->next;
    c->next = NULL;
    if (!next)
        return;
    start(c, next);
    tally__v1__assign__free_unpacked(next, NULL);
}

/* A new assignment takes the place of whatever runs: the coordinator decides who works on what. */
static void on_assign(struct control *c, const Tally__V1__Assign *assign)
{
    if (!c->job) {
        start(c, assign);
        return;
    }
    job_end(c->job);
    if (c->next)
        tally__v1__assign__free_unpacked(c->next, NULL);
    c->next = message_copy(&assign->base);
    if (!c->next)
        send_failed(c, assign, "no memory for an assignment");
}

static void on_end_job(struct control *c, const Tally__V1__EndJob *end)
{
    if (c->next && c->next->job == end->job && c->next->generation <= end->generation) {
        tally__v1__assign__free_unpacked(c->next, NULL);
        c->next = NULL;
    }
    if (!c->job || job_id(c->job) != end->job || job_generation(c->job) > end->generation) {
        send_ended(c, end->job, end->generation);
        return;
    }
    log_info("drops job %" PRIu64 ": %s", end->job, end->reason);
    c->answer = true;
    c->answer_generation = end->generation;
    job_end(c->job);
}

/* ---- the cluster ---- */

static void on_registered(struct node *node, void *user)
{
    (void)node;
    (void)user;
    log_info("registered with the coordinator");
}

static void on_order(struct node *node, const Tally__V1__Order *order, void *user)
{
    (void)node;
    struct control *c = user;
    switch (order->body_case) {
    case TALLY__V1__ORDER__BODY_ASSIGN:
        on_assign(c, order->assign);
        break;
    case TALLY__V1__ORDER__BODY_END_JOB:
        on_end_job(c, order->end_job);
        break;
    case TALLY__V1__ORDER__BODY_SHUTDOWN:
        log_info("leaves: %s", order->shutdown->reason);
        control_leave(c);
        break;
    default: /* a shard's */
        break;
    }
}

static void on_lost(struct node *node, const struct tally_error *why, void *user)
{
    (void)node;
    struct control *c = user;
    log_warn("%s", why->message);
    if (c->next)
        tally__v1__assign__free_unpacked(c->next, NULL);
    c->next = NULL;
    c->answer = false;
    if (c->job)
        job_end(c->job);
}

static void on_failed(struct node *node, const struct tally_error *why, void *user)
{
    (void)node;
    struct control *c = user;
    c->status = why->code ? why->code : TALLY_EINTERNAL;
    c->failure = *why;
    control_leave(c);
}

static void activity(struct node *node, char *text, size_t size, void *user)
{
    (void)node;
    struct control *c = user;
    if (c->job)
        job_activity(c->job, text, size);
    else
        snprintf(text, size, "waits for a job");
}

/* ---- life ---- */

/* The best instruction set of this machine, for Register; also finds out whether the backend can be used at all. */
static tally_status probe_backend(const char *name, char *isa, size_t size, struct tally_error *err)
{
    const struct kernels *kernels = kernels_find(name);
    if (!kernels)
        return tally_fail(err, TALLY_EUNSUPPORTED, "no backend named %s in this build", name);
    struct kernel_backend *backend;
    tally_status status = kernels->open(NULL, 0, &backend, err);
    if (status)
        return status;
    snprintf(isa, size, "%s", kernels->isa(backend));
    kernels->close(backend);
    return TALLY_OK;
}

static tally_status serve(struct control *c, const char *listen, struct tally_error *err)
{
    tally_status status = peers_service_new(data_thread_queue(c->thread), &c->peers, err);
    if (!status)
        status = rpc_server_new(c->queue, NULL, &c->server, err);
    if (!status)
        status = peers_service_serve(c->peers, c->server, err);
    if (!status)
        status = rpc_server_listen(c->server, listen, c->address, sizeof c->address, err);
    if (!status)
        status = rpc_server_start(c->server, err);
    c->serving = !status;
    return status;
}

static tally_status join(struct control *c, const struct control_options *options, const char *isa,
                         struct tally_error *err)
{
    static const struct node_events events = {on_registered, on_order, on_lost, on_failed, activity};
    struct node_options node = {.role = TALLY__V1__ROLE__WORKER,
                                .name = c->name,
                                .coordinator = options->coordinator,
                                .address = c->address,
                                .backend = c->backend,
                                .isa = isa,
                                .join_timeout_ms = options->join_timeout_ms};
    return node_open(c->queue, c->loop, &node, &events, c, &c->node, err);
}

static void control_free(struct control *c)
{
    free(c->name);
    free(c->backend);
    free(c);
}

/* Of a control that could not be opened: a server that was started must still be stopped, so this may run the loop. */
static void undo(struct control *c)
{
    c->leaving = c->node_closed = true;
    c->server_stopped = !c->serving;
    if (c->serving)
        rpc_server_stop(c->server, 0, on_server_stopped, c);
    else
        leave_further(c);
    while (!uv_is_closing((uv_handle_t *)&c->last))
        uv_run(c->loop, UV_RUN_ONCE);
    uv_run(c->loop, UV_RUN_NOWAIT); /* for the handles to close */
    control_free(c);
}

tally_status control_open(uv_loop_t *loop, const struct control_options *options, struct control **ret_control,
                          struct tally_error *err)
{
    char isa[32];
    tally_status status = probe_backend(options->backend, isa, sizeof isa, err);
    if (status)
        return status;
    struct control *c = calloc(1, sizeof *c);
    if (!c)
        return tally_fail(err, TALLY_ENOMEM, "no memory for the worker");
    c->loop = loop;
    uv_timer_init(loop, &c->last);
    c->last.data = c;
    c->name = strdup(options->name);
    c->backend = strdup(options->backend);
    if (!c->name || !c->backend)
        status = tally_fail(err, TALLY_ENOMEM, "no memory for the worker");
    if (!status)
        status = data_thread_start(&c->thread, err);
    if (!status)
        status = rpc_loop_queue_join(loop, data_thread_queue(c->thread), &c->queue, err);
    if (!status)
        status = serve(c, options->listen, err);
    if (!status)
        status = join(c, options, isa, err);
    if (status) {
        undo(c);
        return status;
    }
    *ret_control = c;
    return TALLY_OK;
}

tally_status control_close(struct control *c, struct tally_error *err)
{
    tally_status status = c->status ? tally_fail(err, c->status, "%s", c->failure.message) : TALLY_OK;
    control_free(c);
    return status;
}

const char *control_address(const struct control *c)
{
    return c->address;
}
