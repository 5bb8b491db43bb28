#include "client/local_cluster.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/file.h"
#include "common/limits.h"

#define START_TIMEOUT_NS (INT64_C(10) * 1000000000)
#define EXIT_TEXT_MAX 768

struct child {
    struct local_cluster *cluster;
    uv_process_t process;
    char role[16]; /* coordinator, shard, worker */
    char name[32]; /* coordinator, s0, w0 */
    bool spawned;  /* the handle is open */
    bool running;
};

struct local_cluster {
    uv_loop_t *loop;
    char dir[64];
    char address[96];
    char die_with_parent[48];
    const bool *cancel;
    char *log_dir;
    char *server, *worker; /* the binaries */
    local_cluster_exit on_exit;
    void *user;
    bool stopping;
    char first_exit[EXIT_TEXT_MAX];
    uv_timer_t timer;
    size_t count;
    struct child children[];
};

/* ---- the binaries, beside this one or where Bazel puts them ---- */

static tally_status find_binary(const char *folder, const char *name, char **ret_path, struct tally_error *err)
{
    char self[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    if (n < 0)
        return tally_fail_errno(err, "/proc/self/exe");
    self[n] = '\0';
    char *dir = path_dirname(self);
    char relative[64];
    snprintf(relative, sizeof relative, "../%s/%s", folder, name);
    const char *const places[] = {name, relative};
    for (size_t i = 0; dir && i < 2; i++) {
        char *path = path_join(dir, places[i]);
        if (path && access(path, X_OK) == 0) {
            free(dir);
            *ret_path = path;
            return TALLY_OK;
        }
        free(path);
    }
    tally_status status = tally_fail(err, TALLY_EIO, "%s is not beside %s: expected %s/%s or %s/../%s/%s", name, self,
                                     dir, name, dir, folder, name);
    free(dir);
    return status;
}

/* ---- how a child ended ---- */

/* The last line that the process wrote, without the log line's dressing. Empty if there is none. */
static void last_words(const struct child *child, char *text, size_t size)
{
    text[0] = '\0';
    char name[48];
    snprintf(name, sizeof name, "%s.log", child->name);
    char *path = path_join(child->cluster->log_dir, name);
    FILE *f = path ? fopen(path, "re") : NULL;
    free(path);
    if (!f)
        return;
    char tail[2048];
    fseek(f, 0, SEEK_END);
    long end = ftell(f);
    fseek(f, end > (long)sizeof tail - 1 ? end - (long)sizeof tail + 1 : 0, SEEK_SET);
    size_t n = fread(tail, 1, sizeof tail - 1, f);
    fclose(f);
    while (n > 0 && (tail[n - 1] == '\n' || tail[n - 1] == ' '))
        n--;
    tail[n] = '\0';
    char *line = strrchr(tail, '\n');
    line = line ? line + 1 : tail;
    char *msg = strstr(line, " msg=\"");
    if (msg) {
        line = msg + strlen(" msg=\"");
        size_t length = strlen(line);
        if (length > 0 && line[length - 1] == '"')
            line[length - 1] = '\0';
    }
    snprintf(text, size, "%s", line);
}

/* "worker w1"; returns its length. size: 64 at least. */
static size_t name_text(const struct child *child, char *text, size_t size)
{
    bool alone = strcmp(child->role, child->name) == 0;
    snprintf(text, size, "%s %s", alone ? "the" : child->role, child->name);
    return strlen(text);
}

static void child_text(const struct child *child, int64_t status, int signal_number, char *text, size_t size)
{
    char words[512];
    last_words(child, words, sizeof words);
    size_t used = name_text(child, text, size);
    if (signal_number != 0)
        snprintf(text + used, size - used, " was killed by signal %d (%s)", signal_number, strsignal(signal_number));
    else
        snprintf(text + used, size - used, " ended with status %d%s%s", (int)status, words[0] ? ": " : "", words);
}

static void on_child_exit(uv_process_t *process, int64_t status, int signal_number)
{
    struct child *child = process->data;
    struct local_cluster *cluster = child->cluster;
    child->running = false;
    if (cluster->stopping)
        return;
    char text[EXIT_TEXT_MAX];
    child_text(child, status, signal_number, text, sizeof text);
    if (!cluster->first_exit[0])
        snprintf(cluster->first_exit, sizeof cluster->first_exit, "%s", text);
    if (cluster->on_exit)
        cluster->on_exit(text, cluster->user);
}

/* ---- starting ---- */

/* args: NULL-terminated, behind the program's name. */
static tally_status spawn(struct local_cluster *cluster, const char *program, const char *role, const char *name,
                          char **args, struct tally_error *err)
{
    struct child *child = &cluster->children[cluster->count];
    *child = (struct child){.cluster = cluster};
    snprintf(child->role, sizeof child->role, "%s", role);
    snprintf(child->name, sizeof child->name, "%s", name);
    char log_name[48];
    snprintf(log_name, sizeof log_name, "%s.log", name);
    char *path = path_join(cluster->log_dir, log_name);
    int log = path ? open(path, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0644) : -1;
    if (log < 0) {
        tally_status status = tally_fail_errno(err, "%s", path ? path : log_name);
        free(path);
        return status;
    }
    free(path);
    uv_stdio_container_t stdio[3] = {
        {.flags = UV_IGNORE},
        {.flags = UV_INHERIT_FD, .data.fd = log},
        {.flags = UV_INHERIT_FD, .data.fd = log},
    };
    uv_process_options_t options = {
        .exit_cb = on_child_exit,
        .file = program,
        .args = args,
        .flags = UV_PROCESS_DETACHED, /* a session of its own: the terminal's Ctrl-C is the client's to handle */
        .stdio_count = 3,
        .stdio = stdio,
    };
    child->process.data = child;
    cluster->count++;
    int rc = uv_spawn(cluster->loop, &child->process, &options);
    close(log);
    child->spawned = true; /* also a failed spawn's handle must be closed */
    child->running = rc == 0;
    if (rc != 0)
        return tally_fail(err, TALLY_EIO, "%s cannot be started: %s", program, uv_strerror(rc));
    return TALLY_OK;
}

static tally_status spawn_coordinator(struct local_cluster *cluster, struct tally_error *err)
{
    char state[96];
    snprintf(state, sizeof state, "%s/state", cluster->dir);
    char *args[] = {cluster->server, "coordinator", "--listen",   cluster->address,         "--state",
                    state,           "--private",   cluster->dir, cluster->die_with_parent, NULL};
    return spawn(cluster, cluster->server, "coordinator", "coordinator", args, err);
}

static tally_status spawn_node(struct local_cluster *cluster, bool shard, uint32_t index, struct tally_error *err)
{
    char name[32];
    char listen_at[96];
    snprintf(name, sizeof name, "%c%u", shard ? 's' : 'w', index);
    snprintf(listen_at, sizeof listen_at, "unix:%s/%s.sock", cluster->dir, name);
    char *shard_args[] = {
        cluster->server,          "shard", "--name", name, "--listen", listen_at, "--coordinator", cluster->address,
        cluster->die_with_parent, NULL};
    char *worker_args[] = {
        cluster->worker,          "--name", name, "--listen", listen_at, "--coordinator", cluster->address,
        cluster->die_with_parent, NULL};
    return shard ? spawn(cluster, cluster->server, "shard", name, shard_args, err)
                 : spawn(cluster, cluster->worker, "worker", name, worker_args, err);
}

static bool takes_connections(const char *socket_path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s", socket_path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return false;
    bool yes = connect(fd, (struct sockaddr *)&address, sizeof address) == 0;
    close(fd);
    return yes;
}

/* Nodes that find no coordinator wait a second before they try again, so it is waited for here. */
static tally_status wait_for_coordinator(struct local_cluster *cluster, struct tally_error *err)
{
    const char *path = cluster->address + strlen("unix:");
    int64_t deadline = tally_now_ns() + START_TIMEOUT_NS;
    while (!takes_connections(path)) {
        uv_run(cluster->loop, UV_RUN_NOWAIT);
        if (cluster->first_exit[0])
            return tally_fail(err, TALLY_EIO, "%s", cluster->first_exit);
        if (cluster->cancel && *cluster->cancel)
            return tally_fail(err, TALLY_ECANCELLED, "starting the processes was given up");
        if (tally_now_ns() > deadline)
            return tally_fail(err, TALLY_ETIMEDOUT, "waited 10 s for the coordinator to listen on %s", path);
        nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
    }
    return TALLY_OK;
}

/* A random name that nothing has. */
static bool draw_name(char *name, size_t length)
{
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";
    unsigned char random[8];
    if (length > sizeof random || getrandom(random, length, 0) != (ssize_t)length)
        return false;
    for (size_t i = 0; i < length; i++)
        name[i] = letters[random[i] % (sizeof letters - 1)];
    return true;
}

/*
 * A private folder whose sockets' paths fit sun_path. The coordinator makes and removes it, so that none is left
 * wherever this process is killed; that it can be made is found out here, where it can be said best.
 */
static tally_status name_dir(struct local_cluster *cluster, struct tally_error *err)
{
    enum { RANDOM = 6 };
    const char *base = getenv("TMPDIR");
    if (!base || base[0] != '/' || strlen(base) + sizeof "/tally-XXXXXX" > sizeof cluster->dir)
        base = "/tmp";
    if (access(base, W_OK | X_OK) != 0) {
        tally_fail_errno(err, "no folder for the cluster's sockets can be made in %s", base);
        if (err)
            err->code = TALLY_EIO; /* also where TMPDIR is not there: no job was looked for */
        return TALLY_EIO;
    }
    struct stat info;
    do {
        snprintf(cluster->dir, sizeof cluster->dir, "%s/tally-XXXXXX", base);
        if (!draw_name(cluster->dir + strlen(cluster->dir) - RANDOM, RANDOM))
            return tally_fail_errno(err, "getrandom");
    } while (lstat(cluster->dir, &info) == 0);
    snprintf(cluster->address, sizeof cluster->address, "unix:%s/coordinator.sock", cluster->dir);
    _Static_assert(sizeof cluster->dir + sizeof "/coordinator.sock" < TALLY_UNIX_PATH_MAX, "a socket's path must fit");
    return TALLY_OK;
}

tally_status local_cluster_start(uv_loop_t *loop, const struct local_cluster_options *options,
                                 local_cluster_exit on_exit, void *user, struct local_cluster **ret_cluster,
                                 struct tally_error *err)
{
    size_t children = 1 + (size_t)options->workers + options->shards;
    struct local_cluster *cluster = calloc(1, sizeof *cluster + children * sizeof cluster->children[0]);
    if (!cluster)
        return tally_fail(err, TALLY_ENOMEM, "no memory for %zu processes", children);
    cluster->loop = loop;
    cluster->cancel = options->cancel;
    snprintf(cluster->die_with_parent, sizeof cluster->die_with_parent, "--die-with-parent=%ld", (long)getpid());
    cluster->on_exit = on_exit;
    cluster->user = user;
    uv_timer_init(loop, &cluster->timer);
    cluster->timer.data = cluster;
    cluster->log_dir = strdup(options->log_dir);
    tally_status status = cluster->log_dir ? TALLY_OK : tally_fail(err, TALLY_ENOMEM, "no memory");
    if (status == TALLY_OK)
        status = find_binary("server", "tally-server", &cluster->server, err);
    if (status == TALLY_OK)
        status = find_binary("worker", "tally-worker", &cluster->worker, err);
    if (status == TALLY_OK)
        status = name_dir(cluster, err);
    if (status == TALLY_OK)
        status = spawn_coordinator(cluster, err);
    if (status == TALLY_OK)
        status = wait_for_coordinator(cluster, err);
    for (uint32_t i = 0; status == TALLY_OK && i < options->shards; i++)
        status = spawn_node(cluster, true, i, err);
    for (uint32_t i = 0; status == TALLY_OK && i < options->workers; i++)
        status = spawn_node(cluster, false, i, err);
    if (status != TALLY_OK) {
        local_cluster_stop(cluster, 1000);
        return status;
    }
    *ret_cluster = cluster;
    return TALLY_OK;
}

const char *local_cluster_address(const struct local_cluster *cluster)
{
    return cluster->address;
}

const char *local_cluster_first_exit(const struct local_cluster *cluster)
{
    return cluster->first_exit[0] ? cluster->first_exit : NULL;
}

/* The letter of /proc/PID/stat, behind the name, which is in parentheses and may hold some; 0: unknown. */
static char process_state(int pid)
{
    char path[32];
    char text[256];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *f = fopen(path, "re");
    if (!f)
        return 0;
    size_t n = fread(text, 1, sizeof text - 1, f);
    fclose(f);
    text[n] = '\0';
    const char *end = strrchr(text, ')');
    return end && end[1] == ' ' ? end[2] : 0;
}

bool local_cluster_suspect(const struct local_cluster *cluster, char *text, size_t size)
{
    for (size_t i = 0; i < cluster->count; i++) {
        const struct child *child = &cluster->children[i];
        char socket_path[sizeof cluster->dir + 48];
        snprintf(socket_path, sizeof socket_path, "%s/%s.sock", cluster->dir, child->name);
        bool stopped = process_state(child->process.pid) == 'T';
        if (!child->running || (!stopped && access(socket_path, F_OK) == 0))
            continue;
        size_t used = name_text(child, text, size);
        snprintf(text + used, size - used, stopped ? " was stopped by a signal" : " does not listen");
        return true;
    }
    return false;
}

/* ---- stopping ---- */

static bool any_running(const struct local_cluster *cluster)
{
    for (size_t i = 0; i < cluster->count; i++) {
        if (cluster->children[i].running)
            return true;
    }
    return false;
}

static void signal_all(struct local_cluster *cluster, int signal_number)
{
    for (size_t i = 0; i < cluster->count; i++) {
        if (cluster->children[i].running)
            uv_process_kill(&cluster->children[i].process, signal_number);
    }
}

void local_cluster_kill(struct local_cluster *cluster)
{
    if (cluster)
        signal_all(cluster, SIGKILL);
}

static void on_grace_over(uv_timer_t *timer)
{
    signal_all(timer->data, SIGKILL);
}

/* Where the coordinator could not do it: it was killed, perhaps at that (coordinator_main.c, remove_private). */
static void remove_dir(const char *dir)
{
    char away[sizeof((struct local_cluster *)NULL)->dir + sizeof ".end"];
    snprintf(away, sizeof away, "%s.end", dir);
    file_remove_tree(dir);
    file_remove_tree(away);
}

void local_cluster_stop(struct local_cluster *cluster, int64_t grace_ms)
{
    if (!cluster)
        return;
    cluster->stopping = true;
    signal_all(cluster, SIGTERM);
    signal_all(cluster, SIGCONT); /* a stopped process would not see the SIGTERM */
    if (grace_ms > 0)
        uv_timer_start(&cluster->timer, on_grace_over, (uint64_t)grace_ms, 0);
    else
        signal_all(cluster, SIGKILL);
    while (any_running(cluster)) /* ends: SIGKILL cannot be refused */
        uv_run(cluster->loop, UV_RUN_ONCE);
    for (size_t i = 0; i < cluster->count; i++) {
        if (cluster->children[i].spawned)
            uv_close((uv_handle_t *)&cluster->children[i].process, NULL);
    }
    uv_close((uv_handle_t *)&cluster->timer, NULL);
    for (int i = 0; i < 3; i++) /* lets the handles close */
        uv_run(cluster->loop, UV_RUN_NOWAIT);
    if (cluster->dir[0])
        remove_dir(cluster->dir);
    free(cluster->log_dir);
    free(cluster->server);
    free(cluster->worker);
    free(cluster);
}
