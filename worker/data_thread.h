#ifndef WORKER_DATA_THREAD_H
#define WORKER_DATA_THREAD_H
/*
 * The worker's one thread for its data streams: it is inside rpc_queue_poll of a data queue for as long as the process
 * lives, so that the network is always waited for (the loop queue is joined to it: proto/rpc.h). The steps of
 * small jobs run on it too: a message is then handled by the thread that waits for it, and no step has to wake another
 * thread.
 */
#include "common/error.h"
#include "proto/rpc.h"

struct data_thread;

/* A piece of work for the data thread. Lent: stays where it is until run was called. */
struct data_work {
    void (*run)(
        struct data_work *work); /* outside of rpc_queue_poll: it may and must call that itself while it waits */
    struct rpc_task task;        /* the thread's */
    struct data_thread *thread;  /* the thread's */
};

tally_status data_thread_start(struct data_thread **ret_thread, struct tally_error *err);
/* Its queue. rpc_queue_poll is only for work that runs on it. */
struct rpc_queue *data_thread_queue(struct data_thread *thread);
/* Any thread: has work->run called on the thread, soon. One piece of work at a time. */
void data_thread_run(struct data_thread *thread, struct data_work *work);
/* After everything on the queue has ended. Waits for the thread. NULL is allowed. */
void data_thread_stop(struct data_thread *thread);
#endif
