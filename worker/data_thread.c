#include "worker/data_thread.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>

#include "common/clock.h"

#define POLL_NS 1000000000 /* nothing depends on it: whoever has something to say wakes the queue */

struct data_thread {
    struct rpc_queue *queue;
    pthread_t thread;
    atomic_bool stop;
    struct data_work *work; /* of the data thread alone */
};

static void *data_thread_main(void *arg)
{
    struct data_thread *t = arg;
    while (!atomic_load(&t->stop)) {
        rpc_queue_poll(t->queue, tally_now_ns() + POLL_NS);
        struct data_work *work = t->work;
        t->work = NULL;
        if (work)
            work->run(work);
    }
    return NULL;
}

tally_status data_thread_start(struct data_thread **ret_thread, struct tally_error *err)
{
    struct data_thread *t = calloc(1, sizeof *t);
    if (!t)
        return tally_fail(err, TALLY_ENOMEM, "no memory for the data thread");
    atomic_init(&t->stop, false);
    tally_status status = rpc_data_queue_new(&t->queue, err);
    if (status) {
        free(t);
        return status;
    }
    int failed = pthread_create(&t->thread, NULL, data_thread_main, t);
    if (failed) {
        errno = failed;
        status = tally_fail_errno(err, "cannot start the data thread");
        rpc_queue_free(t->queue);
        free(t);
        return status;
    }
    *ret_thread = t;
    return TALLY_OK;
}

struct rpc_queue *data_thread_queue(struct data_thread *thread)
{
    return thread->queue;
}

static void take_work(struct rpc_task *task)
{
    struct data_work *work = (struct data_work *)((char *)task - offsetof(struct data_work, task));
    assert(!work->thread->work);
    work->thread->work = work; /* run when the poll has returned: it polls itself */
}

void data_thread_run(struct data_thread *thread, struct data_work *work)
{
    work->thread = thread;
    work->task = (struct rpc_task){.run = take_work};
    rpc_queue_post(thread->queue, &work->task);
}

void data_thread_stop(struct data_thread *thread)
{
    if (!thread)
        return;
    atomic_store(&thread->stop, true);
    rpc_queue_wake(thread->queue);
    pthread_join(thread->thread, NULL);
    rpc_queue_free(thread->queue);
    free(thread);
}
