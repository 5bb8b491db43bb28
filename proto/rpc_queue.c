/*
 * Queues. What is posted is pushed to a stack that the queue's thread takes whole and reverses; the queue is woken only
 * when the stack was empty, so a burst costs one wakeup. What completes on a loop queue is posted to it: by a thread of
 * its own, or, where it is joined to a data queue, by whoever polls that. A data queue has no thread: rpc_queue_poll is
 * one completion, run at once.
 *
 * What was posted may run, and be the last thing before rpc_queue_free, while the thread that posted it has not yet
 * woken the queue: `posting` counts the threads in between.
 *
 * gRPC's C API has no alarm: an empty batch on a call that goes nowhere puts a tag on the queue, which is how a poll is
 * woken.
 */
#include <grpc/grpc_posix.h>
#include <grpc/grpc_security.h>
#include <grpc/support/log.h>
#include <malloc.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/check.h"
#include "common/clock.h"
#include "common/limits.h"
#include "proto/rpc_internal.h"

/* Belongs to the loop: freed when the loop has closed both handles, after the queue itself. */
struct loop_part {
    uv_async_t async;
    uv_timer_t timer;
    struct rpc_queue *queue;
    int open_handles;
};

struct rpc_queue {
    grpc_completion_queue *cq;
    struct loop_part *loop;           /* NULL: a data queue */
    bool joined;                      /* a loop queue on the completion queue of a data queue */
    pthread_t thread;                 /* a loop queue that is not */
    _Atomic(struct rpc_task *) tasks; /* newest first */
    atomic_uint posting;
    struct rpc_timer *timers;   /* by deadline; the queue's thread alone */
    grpc_channel *wake_channel; /* data queues */
    grpc_call *wake_call;
    struct rpc_op wake_op;
    atomic_bool wake_pending;
};

/* ---- the process ---- */

static void drop_log(gpr_log_func_args *args)
{
    (void)args; /* what went wrong comes back as a status; set GRPC_VERBOSITY to see gRPC's own words */
}

/*
 * The same buffers of messages come and go in every step. malloc's defaults give their pages back each time, and the
 * page faults cost more than the copies: here up to KEPT_BYTES of free memory stay, in one arena, as gRPC's threads
 * free what others have taken.
 */
static void keep_pages(void)
{
    enum { KEPT_BYTES = 2 * RPC_QUEUED_BYTES };
    mallopt(M_ARENA_MAX, 1);
    mallopt(M_TRIM_THRESHOLD, KEPT_BYTES);
    mallopt(M_MMAP_THRESHOLD, TALLY_MESSAGE_MAX_BYTES); /* what is larger is no message, and goes back at once */
}

void rpc_global_init(void)
{
    keep_pages();
    if (!getenv("GRPC_VERBOSITY"))
        gpr_set_log_function(drop_log);
    /* gRPC's threads must not be the ones that take the process's signals. */
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    grpc_init();
    pthread_sigmask(SIG_SETMASK, &old, NULL);
}

/*
 * After a write that did not fit a socket, a thread of gRPC's may sit in epoll_wait for 10 s, and the shutdown joins
 * it. Anything that happens on a socket makes it come out: a channel over a socket pair is sent nonsense, and closes
 * when that thread has read it. own: read it on this thread, where nobody else does within some milliseconds, which
 * hands the place at epoll_wait to a thread that waits behind. Returns whether another thread has read it.
 */
static bool rouse_backup_poller(bool own)
{
    static const char nonsense[] = "this is no HTTP/2";
    enum { PATIENCE_MS = 20 };
    int ends[2];
    struct rpc_queue *queue = NULL;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0)
        return true;
    grpc_channel_credentials *credentials = grpc_insecure_credentials_create();
    grpc_channel *channel = grpc_channel_create_from_fd("rouse", ends[0], credentials, NULL); /* owns the descriptor */
    grpc_channel_credentials_release(credentials);
    struct pollfd closed = {.fd = ends[1], .events = POLLRDHUP};
    bool roused = send(ends[1], nonsense, sizeof nonsense, MSG_NOSIGNAL) > 0 && poll(&closed, 1, PATIENCE_MS) == 1;
    if (!roused && own && rpc_data_queue_new(&queue, NULL) == TALLY_OK) {
        rpc_queue_poll(queue, tally_now_ns() + PATIENCE_MS * 1000000 / 4);
        rpc_queue_free(queue);
    }
    grpc_channel_destroy(channel);
    close(ends[1]);
    return roused;
}

void rpc_global_shutdown(void)
{
    if (!rouse_backup_poller(true))
        rouse_backup_poller(false);
    grpc_shutdown_blocking();
}

/* ---- work of both kinds ---- */

grpc_completion_queue *rpc_queue_cq(struct rpc_queue *queue)
{
    return queue->cq;
}

static unsigned run_tasks(struct rpc_queue *queue)
{
    struct rpc_task *newest = atomic_exchange_explicit(&queue->tasks, NULL, memory_order_acquire);
    struct rpc_task *oldest = NULL;
    while (newest) {
        struct rpc_task *next = newest->next;
        newest->next = oldest;
        oldest = newest;
        newest = next;
    }
    unsigned count = 0;
    while (oldest) {
        struct rpc_task *next = oldest->next;
        oldest->run(oldest);
        oldest = next;
        count++;
    }
    return count;
}

static void wake(struct rpc_queue *queue)
{
    if (queue->loop)
        uv_async_send(&queue->loop->async);
    else
        rpc_queue_wake(queue);
}

void rpc_queue_post(struct rpc_queue *queue, struct rpc_task *task)
{
    atomic_fetch_add_explicit(&queue->posting, 1, memory_order_relaxed); /* the push below shows it */
    struct rpc_task *head = atomic_load_explicit(&queue->tasks, memory_order_relaxed);
    do {
        task->next = head;
    } while (
        !atomic_compare_exchange_weak_explicit(&queue->tasks, &head, task, memory_order_release, memory_order_relaxed));
    if (!head) /* else whoever made it non-empty wakes the queue */
        wake(queue);
    atomic_fetch_sub_explicit(&queue->posting, 1, memory_order_release);
}

/* ---- timers ---- */

static void loop_timer_fired(uv_timer_t *handle);

static void arm_loop_timer(struct rpc_queue *queue)
{
    if (!queue->loop)
        return;
    if (!queue->timers) {
        uv_timer_stop(&queue->loop->timer);
        return;
    }
    int64_t left = queue->timers->deadline_ns - tally_now_ns();
    uv_update_time(queue->loop->timer.loop);
    uv_timer_start(&queue->loop->timer, loop_timer_fired, left <= 0 ? 0 : (uint64_t)(left + 999999) / 1000000, 0);
}

void rpc_timer_start(struct rpc_queue *queue, struct rpc_timer *timer, int64_t deadline_ns)
{
    rpc_timer_stop(queue, timer);
    timer->deadline_ns = deadline_ns;
    timer->armed = true;
    struct rpc_timer **at = &queue->timers;
    while (*at && (*at)->deadline_ns <= deadline_ns)
        at = &(*at)->next;
    timer->next = *at;
    *at = timer;
    arm_loop_timer(queue);
}

void rpc_timer_stop(struct rpc_queue *queue, struct rpc_timer *timer)
{
    if (!timer->armed)
        return;
    for (struct rpc_timer **at = &queue->timers; *at; at = &(*at)->next) {
        if (*at == timer) {
            *at = timer->next;
            break;
        }
    }
    timer->armed = false;
    arm_loop_timer(queue);
}

static unsigned run_timers(struct rpc_queue *queue)
{
    unsigned count = 0;
    while (queue->timers && queue->timers->deadline_ns <= tally_now_ns()) {
        struct rpc_timer *timer = queue->timers;
        queue->timers = timer->next;
        timer->armed = false;
        timer->fired(timer);
        count++;
    }
    return count;
}

static void loop_timer_fired(uv_timer_t *handle)
{
    struct loop_part *loop = handle->data;
    run_timers(loop->queue);
    arm_loop_timer(loop->queue);
}

/* ---- loop queues ---- */

static void loop_woken(uv_async_t *handle)
{
    struct loop_part *loop = handle->data;
    run_tasks(loop->queue);
}

static void run_done(struct rpc_task *task)
{
    struct rpc_op *op = RPC_CONTAINER(task, struct rpc_op, handover);
    op->done(op, op->ok);
}

/* Of the loop's thread from here on. */
static void hand_over(struct rpc_op *op, bool ok)
{
    op->ok = ok;
    op->handover.run = run_done;
    rpc_queue_post(op->queue, &op->handover);
}

static void *poll_thread(void *arg)
{
    struct rpc_queue *queue = arg;
    for (;;) {
        /* Ends by grpc_completion_queue_shutdown, in rpc_queue_free. */
        grpc_event event = grpc_completion_queue_next(queue->cq, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
        if (event.type == GRPC_QUEUE_SHUTDOWN)
            return NULL;
        if (event.type == GRPC_OP_COMPLETE)
            hand_over(rpc_op_taken(event.tag), event.success != 0);
    }
}

static void loop_handle_closed(uv_handle_t *handle)
{
    struct loop_part *loop = handle->data;
    if (--loop->open_handles == 0)
        free(loop);
}

static void close_loop_part(struct loop_part *loop)
{
    uv_close((uv_handle_t *)&loop->async, loop_handle_closed);
    uv_close((uv_handle_t *)&loop->timer, loop_handle_closed);
}

static struct loop_part *open_loop_part(uv_loop_t *loop, struct rpc_queue *queue)
{
    struct loop_part *part = calloc(1, sizeof *part);
    if (!part)
        return NULL;
    if (uv_async_init(loop, &part->async, loop_woken) != 0) {
        free(part);
        return NULL;
    }
    uv_timer_init(loop, &part->timer);
    part->async.data = part;
    part->timer.data = part;
    part->queue = queue;
    part->open_handles = 2;
    return part;
}

/* The poll thread ends once everything that was under way has come out of the queue. */
static void stop_thread(struct rpc_queue *queue)
{
    grpc_completion_queue_shutdown(queue->cq);
    pthread_join(queue->thread, NULL);
}

/* It takes none of the process's signals. */
static int start_thread(struct rpc_queue *queue)
{
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int failed = pthread_create(&queue->thread, NULL, poll_thread, queue);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (!failed)
        pthread_setname_np(queue->thread, "rpc-poll");
    return failed;
}

/* Without a completion queue. */
static tally_status new_loop_queue(uv_loop_t *loop, struct rpc_queue **ret_queue, struct tally_error *err)
{
    struct rpc_queue *queue = calloc(1, sizeof *queue);
    if (!queue)
        return tally_fail(err, TALLY_ENOMEM, "no memory for an RPC queue");
    queue->loop = open_loop_part(loop, queue);
    if (!queue->loop) {
        free(queue);
        return tally_fail(err, TALLY_EIO, "cannot make an RPC queue of the event loop");
    }
    *ret_queue = queue;
    return TALLY_OK;
}

tally_status rpc_loop_queue_new(uv_loop_t *loop, struct rpc_queue **ret_queue, struct tally_error *err)
{
    struct rpc_queue *queue = NULL;
    tally_status status = new_loop_queue(loop, &queue, err);
    if (status)
        return status;
    queue->cq = grpc_completion_queue_create_for_next(NULL);
    int failed = start_thread(queue);
    if (failed) {
        grpc_completion_queue_shutdown(queue->cq);
        grpc_completion_queue_destroy(queue->cq);
        close_loop_part(queue->loop);
        free(queue);
        return tally_fail(err, TALLY_EIO, "cannot start an RPC thread: %s", strerror(failed));
    }
    *ret_queue = queue;
    return TALLY_OK;
}

tally_status rpc_loop_queue_join(uv_loop_t *loop, struct rpc_queue *data, struct rpc_queue **ret_queue,
                                 struct tally_error *err)
{
    struct rpc_queue *queue = NULL;
    tally_status status = new_loop_queue(loop, &queue, err);
    if (status)
        return status;
    queue->cq = data->cq;
    queue->joined = true;
    *ret_queue = queue;
    return TALLY_OK;
}

/* ---- data queues ---- */

static void woken(struct rpc_op *op, bool ok)
{
    (void)ok;
    struct rpc_queue *queue = RPC_CONTAINER(op, struct rpc_queue, wake_op);
    atomic_store_explicit(&queue->wake_pending, false, memory_order_release);
}

tally_status rpc_data_queue_new(struct rpc_queue **ret_queue, struct tally_error *err)
{
    struct rpc_queue *queue = calloc(1, sizeof *queue);
    if (!queue)
        return tally_fail(err, TALLY_ENOMEM, "no memory for an RPC queue");
    queue->cq = grpc_completion_queue_create_for_next(NULL);
    queue->wake_channel = grpc_lame_client_channel_create("wake", GRPC_STATUS_INTERNAL, "goes nowhere");
    queue->wake_call = grpc_channel_create_call(queue->wake_channel, NULL, GRPC_PROPAGATE_DEFAULTS, queue->cq,
                                                grpc_slice_from_static_string("/wake"), NULL,
                                                gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
    queue->wake_op.done = woken;
    *ret_queue = queue;
    return TALLY_OK;
}

void rpc_queue_wake(struct rpc_queue *queue)
{
    if (queue->loop)
        return;
    if (atomic_exchange_explicit(&queue->wake_pending, true, memory_order_acq_rel))
        return;
    rpc_op_arm(&queue->wake_op, queue);
    grpc_call_error e = grpc_call_start_batch(queue->wake_call, NULL, 0, &queue->wake_op, NULL);
    GPR_ASSERT(e == GRPC_CALL_OK);
}

unsigned rpc_queue_poll(struct rpc_queue *queue, int64_t deadline_ns)
{
    if (queue->timers && queue->timers->deadline_ns < deadline_ns)
        deadline_ns = queue->timers->deadline_ns;
    if (deadline_ns < 0)
        deadline_ns = 0;
    gpr_timespec deadline = {.tv_sec = deadline_ns / 1000000000,
                             .tv_nsec = (int32_t)(deadline_ns % 1000000000),
                             .clock_type = GPR_CLOCK_MONOTONIC};
    grpc_event event = grpc_completion_queue_next(queue->cq, deadline, NULL);
    unsigned handled = 0;
    if (event.type == GRPC_OP_COMPLETE) {
        struct rpc_op *op = rpc_op_taken(event.tag);
        if (op->queue == queue)
            op->done(op, event.success != 0);
        else
            hand_over(op, event.success != 0);
        handled += op != &queue->wake_op;
    }
    if (atomic_load_explicit(&queue->tasks, memory_order_relaxed))
        handled += run_tasks(queue);
    if (queue->timers)
        handled += run_timers(queue);
    return handled;
}

/* Takes out what a wake or a post left behind; everything else has ended, as the header asks. */
static void drain_data_queue(struct rpc_queue *queue)
{
    grpc_call_unref(queue->wake_call);
    grpc_channel_destroy(queue->wake_channel);
    grpc_completion_queue_shutdown(queue->cq);
    gpr_timespec deadline = gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_seconds(10, GPR_TIMESPAN));
    grpc_event event;
    do {
        event = grpc_completion_queue_next(queue->cq, deadline, NULL);
        tally_check(event.type != GRPC_QUEUE_TIMEOUT); /* calls on this queue have not ended: the caller's misuse */
        if (event.type == GRPC_OP_COMPLETE && event.tag != &queue->wake_op) {
            struct rpc_op *op = rpc_op_taken(event.tag);
            op->done(op, event.success != 0);
        }
    } while (event.type != GRPC_QUEUE_SHUTDOWN);
}

void rpc_queue_free(struct rpc_queue *queue)
{
    if (!queue)
        return;
    if (queue->loop && !queue->joined)
        stop_thread(queue);
    run_tasks(queue);
    while (atomic_load_explicit(&queue->posting, memory_order_acquire) > 0) /* some instructions of another thread */
        sched_yield();
    if (queue->loop)
        close_loop_part(queue->loop);
    else
        drain_data_queue(queue);
    if (!queue->joined)
        grpc_completion_queue_destroy(queue->cq);
    free(queue);
}
