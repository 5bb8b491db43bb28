/* tally-server coordinator: the coordinator and the signals that end it. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <uv.h>

#include "common/daemon.h"
#include "common/file.h"
#include "common/limits.h"
#include "common/log.h"
#include "proto/rpc.h"
#include "server/coordinator.h"
#include "server/main.h"

#define PROGRAM "tally-server coordinator"

/* From the wish to stop to the end of the process at the latest. */
#define STOP_MS 5000

/* A lease of less than a heartbeat's way there and back would lose every node; one of a day is never meant. */
#define LEASE_MIN_MS 50
#define LEASE_MAX_MS 86400000

struct daemon {
    uv_loop_t loop;
    struct coordinator *coordinator;
    uv_signal_t signals[2];
    uv_timer_t deadline;
    bool stopping;
};

static void close_handles(struct daemon *daemon)
{
    for (int i = 0; i < 2; i++)
        uv_close((uv_handle_t *)&daemon->signals[i], NULL);
    daemon_ignore_signals();
    uv_close((uv_handle_t *)&daemon->deadline, NULL);
}

static void on_deadline(uv_timer_t *timer)
{
    (void)timer;
    log_warn("could not end cleanly within %d ms", STOP_MS);
    _exit(0);
}

static void on_closed(void *user)
{
    close_handles(user);
}

static void on_signal(uv_signal_t *handle, int signum)
{
    struct daemon *daemon = handle->data;
    if (daemon->stopping)
        return;
    daemon->stopping = true;
    log_info("stops: %s", strsignal(signum));
    uv_timer_start(&daemon->deadline, on_deadline, STOP_MS, 0);
    coordinator_close(daemon->coordinator, on_closed, daemon);
}

static int run(const struct coordinator_options *options)
{
    static const int signums[2] = {SIGTERM, SIGINT};
    struct daemon daemon = {0};
    struct tally_error err;
    int code = 0;
    if (uv_loop_init(&daemon.loop) != 0) {
        fprintf(stderr, "%s: cannot make an event loop\n", PROGRAM);
        return 1;
    }
    for (int i = 0; i < 2; i++) {
        uv_signal_init(&daemon.loop, &daemon.signals[i]);
        daemon.signals[i].data = &daemon;
    }
    uv_timer_init(&daemon.loop, &daemon.deadline);
    daemon.deadline.data = &daemon;
    if (coordinator_open(&daemon.loop, options, &daemon.coordinator, &err) != TALLY_OK) {
        fprintf(stderr, "%s: %s\n", PROGRAM, err.message);
        code = 1;
        close_handles(&daemon);
    } else {
        for (int i = 0; i < 2; i++)
            uv_signal_start(&daemon.signals[i], on_signal, signums[i]);
        daemon_take_signals();
    }
    uv_run(&daemon.loop, UV_RUN_DEFAULT);
    uv_loop_close(&daemon.loop);
    return code;
}

/* As they are written: this guards against a slip, not against links. */
static bool is_inside(const char *path, const char *folder)
{
    size_t length = strlen(folder);
    return length > 1 && strncmp(path, folder, length) == 0 && path[length] == '/' && path[length + 1] != '\0' &&
           !strstr(path + length, "..");
}

/* Out of the way first: a node that starts right now would put its socket where files are being removed. */
static void remove_private(const char *folder)
{
    char *away = NULL;
    bool moved = asprintf(&away, "%s.end", folder) > 0 && rename(folder, away) == 0;
    file_remove_tree(moved ? away : folder);
    free(away);
}

int coordinator_main(int argc, char **argv)
{
    enum { LISTEN, STATE, LEASE, PRIVATE, OPTIONS };
    char lease_default[16];
    snprintf(lease_default, sizeof lease_default, "%d", TALLY_LEASE_MS);
    struct daemon_option options[OPTIONS] = {
        [LISTEN] = {"listen", "ADDR", "where clients and nodes reach it: unix:/path or host:port", true, NULL},
        [STATE] = {"state", "DIR", "its folder: jobs, events and results; made if it is missing", true, NULL},
        [LEASE] = {"lease-ms", "MS", "a node that is not heard of for so long is lost", false, lease_default},
        [PRIVATE] = {"private", "DIR", "a folder for one run: made at the start, removed at the end", false, NULL},
    };
    enum tally_log_level level;
    long lease_ms;
    int code = daemon_parse(PROGRAM, "owns jobs, membership, gangs and results", argc, argv, options, OPTIONS, &level);
    if (code != DAEMON_GO_ON)
        return code;
    if (daemon_number(PROGRAM, &options[LEASE], LEASE_MAX_MS, &lease_ms) != 0)
        return 2;
    if (lease_ms < LEASE_MIN_MS) {
        fprintf(stderr, "%s: --lease-ms %ld: expected at least %d\n", PROGRAM, lease_ms, LEASE_MIN_MS);
        return 2;
    }
    if (options[PRIVATE].value && !is_inside(options[STATE].value, options[PRIVATE].value)) {
        fprintf(stderr, "%s: --private %s: expected a folder that --state is in\n", PROGRAM, options[PRIVATE].value);
        return 2;
    }
    if (options[PRIVATE].value && mkdir(options[PRIVATE].value, 0700) != 0) {
        fprintf(stderr, "%s: cannot make the folder %s: %s\n", PROGRAM, options[PRIVATE].value, strerror(errno));
        return 1;
    }
    tally_log_init("coordinator", "", level);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* a file that may not grow is an error of the write */
    rpc_global_init();
    const struct coordinator_options coordinator = {
        .listen = options[LISTEN].value, .directory = options[STATE].value, .lease_ms = lease_ms};
    code = run(&coordinator);
    if (options[PRIVATE].value)
        remove_private(options[PRIVATE].value);
    daemon_end_within(STOP_MS / 1000, code);
    rpc_global_shutdown();
    return code;
}
