/* tally-server shard: a shard, its place in the cluster, and the signals that end it. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <uv.h>

#include "cluster/node.h"
#include "common/daemon.h"
#include "common/log.h"
#include "proto/rpc.h"
#include "server/main.h"
#include "server/shard.h"

#define PROGRAM "tally-server shard"

/* From the wish to stop to the end of the process at the latest. */
#define STOP_MS 5000

struct daemon {
    uv_loop_t loop;
    struct shard *shard;
    struct node *node;
    uv_signal_t signals[2];
    uv_timer_t deadline;
    bool stopping;
    int exit_code;
};

/* ---- the end ---- */

static void on_deadline(uv_timer_t *timer)
{
    const struct daemon *daemon = timer->data;
    log_warn("could not end cleanly within %d ms", STOP_MS);
    _exit(daemon->exit_code);
}

static void close_handles(struct daemon *daemon)
{
    for (int i = 0; i < 2; i++)
        uv_close((uv_handle_t *)&daemon->signals[i], NULL);
    daemon_ignore_signals();
    uv_close((uv_handle_t *)&daemon->deadline, NULL);
    shard_free(daemon->shard);
}

static void on_shard_stopped(void *user)
{
    close_handles(user);
}

/* The node goes first: until it has left, the coordinator may count on the shard. */
static void on_node_closed(void *user)
{
    struct daemon *daemon = user;
    daemon->node = NULL;
    shard_stop(daemon->shard, "the shard leaves the cluster");
}

static void stop(struct daemon *daemon, const char *reason)
{
    if (daemon->stopping)
        return;
    daemon->stopping = true;
    if (daemon->exit_code == 0)
        log_info("stops: %s", reason);
    uv_timer_start(&daemon->deadline, on_deadline, STOP_MS, 0);
    if (daemon->node)
        node_close(daemon->node, on_node_closed, daemon);
    else if (daemon->shard)
        shard_stop(daemon->shard, reason);
    else
        close_handles(daemon);
}

static void on_signal(uv_signal_t *handle, int signum)
{
    stop(handle->data, strsignal(signum));
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
    struct daemon *daemon = user;
    if (order->body_case == TALLY__V1__ORDER__BODY_SHUTDOWN)
        stop(daemon, order->shutdown->reason[0] ? order->shutdown->reason : "the coordinator asked for it");
    else
        shard_order(daemon->shard, order);
}

static void on_lost(struct node *node, const struct tally_error *why, void *user)
{
    (void)node;
    struct daemon *daemon = user;
    log_warn("lost the coordinator: %s", why->message);
    shard_lost(daemon->shard, "the shard lost its coordinator");
}

static void on_failed(struct node *node, const struct tally_error *why, void *user)
{
    (void)node;
    struct daemon *daemon = user;
    fprintf(stderr, "%s: %s\n", PROGRAM, why->message);
    daemon->exit_code = 1;
    stop(daemon, "it cannot join the cluster");
}

static void activity(struct node *node, char *text, size_t size, void *user)
{
    (void)node;
    shard_activity(((struct daemon *)user)->shard, text, size);
}

static tally_status send_to_coordinator(const Tally__V1__NodeMessage *message, void *user)
{
    const struct daemon *daemon = user;
    return daemon->node ? node_send(daemon->node, message, NULL) : TALLY_EUNAVAIL;
}

/* ---- the beginning ---- */

enum { NAME, LISTEN, COORDINATOR, JOIN_TIMEOUT, OPTIONS };

static tally_status start(struct daemon *daemon, const struct daemon_option *options, long join_timeout_ms,
                          struct tally_error *err)
{
    static const struct shard_events shard_events = {.send = send_to_coordinator, .on_stopped = on_shard_stopped};
    static const struct node_events node_events = {.on_registered = on_registered,
                                                   .on_order = on_order,
                                                   .on_lost = on_lost,
                                                   .on_failed = on_failed,
                                                   .activity = activity};
    tally_status status = shard_open(&daemon->loop, options[LISTEN].value, &shard_events, daemon, &daemon->shard, err);
    if (status != TALLY_OK)
        return status;
    const struct node_options node_options = {.role = TALLY__V1__ROLE__SHARD,
                                              .name = options[NAME].value,
                                              .coordinator = options[COORDINATOR].value,
                                              .address = shard_address(daemon->shard),
                                              .join_timeout_ms = join_timeout_ms};
    return node_open(shard_loop_queue(daemon->shard), &daemon->loop, &node_options, &node_events, daemon, &daemon->node,
                     err);
}

static int run(const struct daemon_option *options, long join_timeout_ms)
{
    static const int signums[2] = {SIGTERM, SIGINT};
    struct daemon daemon = {0};
    struct tally_error err;
    if (uv_loop_init(&daemon.loop) != 0) {
        fprintf(stderr, "%s: cannot make an event loop\n", PROGRAM);
        return 1;
    }
    for (int i = 0; i < 2; i++) {
        uv_signal_init(&daemon.loop, &daemon.signals[i]);
        daemon.signals[i].data = &daemon;
        uv_signal_start(&daemon.signals[i], on_signal, signums[i]);
    }
    uv_timer_init(&daemon.loop, &daemon.deadline);
    daemon.deadline.data = &daemon;
    if (start(&daemon, options, join_timeout_ms, &err) != TALLY_OK) {
        fprintf(stderr, "%s: %s\n", PROGRAM, err.message);
        daemon.exit_code = 1;
        stop(&daemon, "it could not start");
    } else {
        log_info("serves at %s", shard_address(daemon.shard));
    }
    daemon_take_signals();
    uv_run(&daemon.loop, UV_RUN_DEFAULT);
    uv_loop_close(&daemon.loop);
    return daemon.exit_code;
}

int shard_main(int argc, char **argv)
{
    struct daemon_option options[OPTIONS] = {
        [NAME] = {"name", "NAME", "its name in the cluster, such as s0", true, NULL},
        [LISTEN] = {"listen", "ADDR", "where workers reach it: unix:/path or host:port", true, NULL},
        [COORDINATOR] = {"coordinator", "ADDR", "where the coordinator listens", true, NULL},
        [JOIN_TIMEOUT] = {"join-timeout-ms", "MS", "give up after so long without a coordinator; 0: never", false,
                          "30000"},
    };
    enum tally_log_level level;
    long join_timeout_ms;
    int code = daemon_parse(PROGRAM, "holds a part of the parameters, sums gradients, applies the optimizer", argc,
                            argv, options, OPTIONS, &level);
    if (code != DAEMON_GO_ON)
        return code;
    if (daemon_number(PROGRAM, &options[JOIN_TIMEOUT], 86400000, &join_timeout_ms) != 0)
        return 2;
    tally_log_init("shard", options[NAME].value, level);
    signal(SIGPIPE, SIG_IGN);
    rpc_global_init();
    code = run(options, join_timeout_ms);
    daemon_end_within(STOP_MS / 1000, code);
    rpc_global_shutdown();
    return code;
}
