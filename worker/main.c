/* tally-worker: joins a coordinator's cluster and trains what it is assigned. */
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <uv.h>

#include "common/daemon.h"
#include "common/log.h"
#include "proto/rpc.h"
#include "worker/control.h"

#define PROGRAM "tally-worker"

/* From the wish to stop to the end of the process at the latest: an operation may take as long as its micro-batch is
 * large. */
#define STOP_MS 5000

struct worker {
    uv_loop_t loop;
    struct control *control;
    uv_signal_t signals[2];
    uv_timer_t deadline;
};

static void on_deadline(uv_timer_t *timer)
{
    (void)timer;
    log_warn("could not end cleanly within %d ms", STOP_MS);
    _exit(0);
}

static void on_signal(uv_signal_t *handle, int signum)
{
    struct worker *w = handle->data;
    log_info("leaves: %s", strsignal(signum));
    if (!uv_is_active((uv_handle_t *)&w->deadline)) {
        uv_timer_start(&w->deadline, on_deadline, STOP_MS, 0);
        uv_unref((uv_handle_t *)&w->deadline);
    }
    control_leave(w->control);
}

static void close_handles(struct worker *w)
{
    for (int i = 0; i < 2; i++)
        uv_close((uv_handle_t *)&w->signals[i], NULL);
    daemon_ignore_signals();
    uv_close((uv_handle_t *)&w->deadline, NULL);
    uv_run(&w->loop, UV_RUN_DEFAULT);
    uv_loop_close(&w->loop);
}

static int run(const struct control_options *options)
{
    static const int signums[2] = {SIGTERM, SIGINT};
    struct worker w = {0};
    struct tally_error err;
    if (uv_loop_init(&w.loop) != 0) {
        fprintf(stderr, "%s: cannot make an event loop\n", PROGRAM);
        return 1;
    }
    for (int i = 0; i < 2; i++)
        uv_signal_init(&w.loop, &w.signals[i]);
    uv_timer_init(&w.loop, &w.deadline);
    tally_status status = control_open(&w.loop, options, &w.control, &err);
    if (!status) {
        for (int i = 0; i < 2; i++) {
            w.signals[i].data = &w;
            uv_signal_start(&w.signals[i], on_signal, signums[i]);
            uv_unref((uv_handle_t *)&w.signals[i]); /* the loop runs for as long as the control does */
        }
        daemon_take_signals();
        log_info("serves at %s, joins %s", control_address(w.control), options->coordinator);
        uv_run(&w.loop, UV_RUN_DEFAULT);
        status = control_close(w.control, &err);
    }
    close_handles(&w);
    if (status)
        fprintf(stderr, "%s: %s\n", PROGRAM, err.message);
    return status ? 1 : 0;
}

enum { NAME, LISTEN, COORDINATOR, BACKEND, JOIN_TIMEOUT, OPTIONS };

int main(int argc, char **argv)
{
    struct daemon_option options[OPTIONS] = {
        [NAME] = {"name", "NAME", "its name in the cluster, such as w0", true, NULL},
        [LISTEN] = {"listen", "ADDR", "where it is reached: unix:/path or host:port", true, NULL},
        [COORDINATOR] = {"coordinator", "ADDR", "where the coordinator listens", true, NULL},
        [BACKEND] = {"backend", "NAME", "what computes: cpu", false, "cpu"},
        [JOIN_TIMEOUT] = {"join-timeout-ms", "MS", "give up after so long without a coordinator; 0: never", false,
                          "30000"},
    };
    enum tally_log_level level;
    long join_timeout_ms;
    int code = daemon_parse(PROGRAM, "trains what a coordinator assigns to it", argc, argv, options, OPTIONS, &level);
    if (code != DAEMON_GO_ON)
        return code;
    if (daemon_number(PROGRAM, &options[JOIN_TIMEOUT], 86400000, &join_timeout_ms) != 0)
        return 2;
    tally_log_init("worker", options[NAME].value, level);
    signal(SIGPIPE, SIG_IGN);
    rpc_global_init();
    struct control_options control = {.name = options[NAME].value,
                                      .listen = options[LISTEN].value,
                                      .coordinator = options[COORDINATOR].value,
                                      .backend = options[BACKEND].value,
                                      .join_timeout_ms = join_timeout_ms};
    code = run(&control);
    daemon_end_within(STOP_MS / 1000, code);
    rpc_global_shutdown();
    return code;
}
