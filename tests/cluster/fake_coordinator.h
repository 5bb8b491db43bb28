#ifndef TESTS_CLUSTER_FAKE_COORDINATOR_H
#define TESTS_CLUSTER_FAKE_COORDINATOR_H
/* A coordinator for tests of nodes: the Cluster service over real RPC on a UNIX socket, on the test's own loop. It does
 * what its fields say, and keeps what it has seen. */
#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

#include "proto/cluster.pb-c.h"
#include "proto/rpc.h"

#define LEASE_MS 150
#define WAIT_MS 10000

enum answer { ANSWER_ACCEPT, ANSWER_REFUSE, ANSWER_SILENCE };

struct coordinator {
    uv_loop_t loop;
    struct rpc_queue *queue;
    struct rpc_server *server; /* NULL: not serving */
    char directory[64], address[128];
    enum answer answer; /* to Register */
    const char *refusal;
    uint32_t lease_ms;
    bool acknowledge; /* heartbeats */
    /* Everything but Register and Heartbeat. May be NULL. */
    void (*on_report)(const Tally__V1__NodeMessage *message, void *user);
    void *user;
    struct rpc_stream *stream; /* of the node that is registered; NULL: none */
    unsigned open_streams;
    unsigned registers, beats, half_closes, ends;
    uint64_t incarnations[16];
    uint32_t major;
    char name[32], activity[512], isa[16], backend[16], node_address[256];
    Tally__V1__Role role;
    bool stopped;
};

/* Makes the loop, its queue and a directory; does not serve yet. These functions fail the test where they fail. */
struct coordinator *coordinator_new(enum answer answer, bool acknowledge);
void coordinator_serve(struct coordinator *c);
void coordinator_unserve(struct coordinator *c);
/* When every node has gone: waits for the last streams, and frees all. */
void coordinator_free(struct coordinator *c);
void coordinator_send(struct coordinator *c, const Tally__V1__Order *order);
/* Runs the loop until condition(user) is true, or for so long. Returns whether it was. */
bool coordinator_run(struct coordinator *c, bool (*condition)(const void *user), const void *user, int64_t wait_ms);
#endif
