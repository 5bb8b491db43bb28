/* A shard for shard_grpc_test.py, which talks to it with grpcio alone. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/server/shard_rig.h"

struct child {
    pid_t pid;
    int status;
};

static bool has_ended(void *user)
{
    struct child *child = user;
    return waitpid(child->pid, &child->status, WNOHANG) == child->pid;
}

static void test_from_python(void **state)
{
    (void)state;
    static struct rig rig;
    static const struct rig_job job = {.id = 1,
                                       .generation = 1,
                                       .workers = 3,
                                       .shards = 1,
                                       .inputs = 3,
                                       .widths = {2},
                                       .layers = 1,
                                       .samples = 2,
                                       .batch = 2,
                                       .steps = 100,
                                       .lr = 0.5};
    const char *python = getenv("TALLY_TEST_PYTHON");
    rpc_global_init();
    rig_open(&rig);
    model_free(rig_open_job(&rig, &job));
    struct child child = {.pid = fork()};
    if (child.pid == 0) {
        unsetenv("LD_PRELOAD");
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        python = python ? python : "/usr/bin/python3";
        execl(python, python, "-B", "tests/server/shard_grpc_test.py", rig.address, "proto/messages.descriptor_set.bin",
              (char *)NULL);
        _exit(127);
    }
    rig_wait(&rig, has_ended, &child, "the Python program");
    assert_int_equal(child.status, 0);
    rig_end_job(&rig, 1, 1);
    assert_int_equal(rig.failed, 0);
    rig_close(&rig);
    rpc_global_shutdown();
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_from_python)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
