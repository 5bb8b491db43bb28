#ifndef TESTS_PROTO_RPC_FIXTURE_H
#define TESTS_PROTO_RPC_FIXTURE_H
/* A server with a loop queue and a data queue, each on a thread of its own, and a client's queue: what most tests of
 * the wrapper begin with. */
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>

#include "proto/rpc.h"

struct fixture {
    uv_loop_t loop; /* runs on loop_thread */
    uv_async_t stop_async;
    uv_thread_t loop_thread, data_thread;
    struct rpc_queue *loop_queue, *data_queue; /* the server's */
    struct rpc_server *server;
    struct rpc_queue *client_queue; /* a data queue that the test polls */
    struct rpc_channel *channel;
    char address[RPC_ADDRESS_MAX];
    char directory[64];
    atomic_bool stopped;
    int64_t drain_ms;
    bool server_running;
};

/* tcp: 127.0.0.1, else a UNIX socket. joined: the loop queue to the data queue. Services come with add (may be NULL)
 * before the start. */
void fixture_start(struct fixture *f, bool tcp, bool joined, void (*add)(struct fixture *f));
/* Stops the server, waiting for its end. */
void fixture_stop_server(struct fixture *f, int64_t drain_ms);
void fixture_stop(struct fixture *f);

/* Polls queue until *flag, at most 20 s: then fails the test with the text. */
void wait_for(struct rpc_queue *queue, const atomic_bool *flag, const char *what);
/* The same until *count >= target. */
void wait_count(struct rpc_queue *queue, const atomic_uint *count, unsigned target, const char *what);
#endif
