/* Two stages over RPC in this process, and one that this test plays message by message: what is sent comes as it was,
 * within the room; what is repeated or late does no harm; every failure comes with its reason. */
#include "worker/peers_rpc.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/clock.h"
#include "common/limits.h"
#include "tests/worker/test_job.h"

#define JOB 7
#define GENERATION 3
#define WAIT_MS 20000

/* What a worker's process has, but for its loop. */
struct host {
    struct data_thread *thread;
    struct peers_service *service;
    struct rpc_server *server;
    char address[RPC_ADDRESS_MAX];
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    bool stopped, worked;
    struct rpc_task stop;
    struct data_work work;
    void (*job)(void *context);
    void *context;
};

struct pair {
    struct test_job *job;
    struct host hosts[2];
    struct test_rank ranks[2];
    struct peers_rpc *peers[2]; /* NULL: not opened */
    char folder[64];
    uint32_t forward, backward; /* edges */
};

static void host_start(struct host *h, const char *folder, unsigned index)
{
    struct tally_error err;
    char address[128];
    snprintf(address, sizeof address, "unix:%s/w%u.sock", folder, index);
    pthread_mutex_init(&h->mutex, NULL);
    pthread_cond_init(&h->changed, NULL);
    if (data_thread_start(&h->thread, &err) || peers_service_new(data_thread_queue(h->thread), &h->service, &err) ||
        rpc_server_new(data_thread_queue(h->thread), NULL, &h->server, &err) ||
        peers_service_serve(h->service, h->server, &err) ||
        rpc_server_listen(h->server, address, h->address, sizeof h->address, &err) || rpc_server_start(h->server, &err))
        fail_msg("%s", err.message);
}

static void set(struct host *h, bool *flag)
{
    pthread_mutex_lock(&h->mutex);
    *flag = true;
    pthread_cond_signal(&h->changed);
    pthread_mutex_unlock(&h->mutex);
}

static void await(struct host *h, const bool *flag)
{
    pthread_mutex_lock(&h->mutex);
    while (!*flag)
        pthread_cond_wait(&h->changed, &h->mutex);
    pthread_mutex_unlock(&h->mutex);
}

static void on_stopped(void *user)
{
    struct host *h = user;
    set(h, &h->stopped);
}

static void stop_server(struct rpc_task *task)
{
    struct host *h = (struct host *)((char *)task - offsetof(struct host, stop));
    rpc_server_stop(h->server, 0, on_stopped, h);
}

static void host_stop(struct host *h)
{
    h->stop.run = stop_server;
    rpc_queue_post(data_thread_queue(h->thread), &h->stop);
    await(h, &h->stopped);
    data_thread_stop(h->thread);
    rpc_server_free(h->server);
    peers_service_free(h->service);
    pthread_cond_destroy(&h->changed);
    pthread_mutex_destroy(&h->mutex);
}

static void do_work(struct data_work *work)
{
    struct host *h = (struct host *)((char *)work - offsetof(struct host, work));
    h->job(h->context);
    set(h, &h->worked);
}

/* On the data thread, as small jobs do. */
static void host_run(struct host *h, void (*job)(void *context), void *context)
{
    h->worked = false;
    h->job = job;
    h->context = context;
    h->work.run = do_work;
    data_thread_run(h->thread, &h->work);
    await(h, &h->worked);
}

/* rows samples a micro-batch, `columns` floats each between the stages, `steps` steps of four. */
static struct pair *pair_open(uint32_t rows, uint32_t columns)
{
    struct pair *p = calloc(1, sizeof *p);
    assert_non_null(p);
    Tally__V1__JobSpec *spec = spec_new(1, 4 * rows, rows, 0, 50);
    spec_linear(spec, "a", columns, true);
    spec_linear(spec, "b", 3, true);
    spec_cross_entropy(spec, -100, 0);
    spec_sgd(spec, 0.1, 0, 0, false);
    spec_synthetic(spec, 0, 4 * rows, 3, (uint32_t[]){5}, 1, NULL, 0);
    spec_place(spec, 0, "a");
    spec_place(spec, 1, "b");
    p->job = test_job_open(spec);
    snprintf(p->folder, sizeof p->folder, "/tmp/tally-peers-XXXXXX");
    assert_non_null(mkdtemp(p->folder));
    for (unsigned i = 0; i < 2; i++) {
        host_start(&p->hosts[i], p->folder, i);
        test_rank_plan(p->job, i, (struct mesh){1, 2, 1}, NULL, &p->ranks[i]);
    }
    const struct plan *plan = p->ranks[0].plan;
    assert_int_equal(plan->edge_count, 2);
    p->forward = plan->edges[0].backward ? 1 : 0;
    p->backward = 1 - p->forward;
    return p;
}

static tally_status pair_connect(struct pair *p, unsigned i, bool on_data_thread, int64_t wait_ms, uint64_t generation,
                                 struct tally_error *err)
{
    char *names[2] = {"w0", "w1"}, *addresses[2] = {p->hosts[0].address, p->hosts[1].address};
    struct peers_rpc_options options = {.job = JOB,
                                        .generation = generation,
                                        .plan = p->ranks[i].plan,
                                        .names = names,
                                        .addresses = addresses,
                                        .service = p->hosts[i].service,
                                        .thread = p->hosts[i].thread,
                                        .on_data_thread = on_data_thread,
                                        .wait_ms = wait_ms};
    tally_status status = peers_rpc_open(&options, &p->peers[i], err);
    return status ? status : peers_rpc_connect(p->peers[i], err);
}

static void connect_one(struct pair *p, unsigned i, bool on_data_thread, int64_t wait_ms)
{
    struct tally_error err;
    if (pair_connect(p, i, on_data_thread, wait_ms, GENERATION, &err))
        fail_msg("%s", err.message);
}

static void pair_close(struct pair *p)
{
    for (unsigned i = 0; i < 2; i++)
        if (p->peers[i])
            peers_rpc_done(p->peers[i]);
    for (unsigned i = 0; i < 2; i++)
        peers_rpc_close(p->peers[i]);
    for (unsigned i = 0; i < 2; i++) {
        host_stop(&p->hosts[i]);
        test_rank_close(&p->ranks[i]);
    }
    test_job_close(p->job);
    assert_int_equal(rmdir(p->folder), 0);
    free(p);
}

static struct peer_tensor tensor_of(const struct pair *p, bool backward, uint64_t step, uint32_t micro_batch)
{
    const struct plan *plan = p->ranks[0].plan;
    uint32_t edge = backward ? p->backward : p->forward;
    size_t columns = plan->tensors[plan->edges[edge].tensor].elements;
    return (struct peer_tensor){.step = step,
                                .micro_batch = micro_batch,
                                .edge = edge,
                                .direction = backward ? TALLY__V1__DIRECTION__BACKWARD : TALLY__V1__DIRECTION__FORWARD,
                                .rows = plan->batches.micro,
                                .columns = columns,
                                .stride = columns};
}

static float value_at(const struct peer_tensor *t, size_t row, size_t column)
{
    return (float)(t->step * 1000 + t->micro_batch * 100 + t->evaluation * 7) + (float)row * 0.5f +
           (float)column * 0.001f + (t->direction == TALLY__V1__DIRECTION__BACKWARD ? 0.25f : 0);
}

static float *tensor_new(const struct peer_tensor *t, bool fill)
{
    float *data = malloc(t->rows * t->stride * sizeof *data);
    assert_non_null(data);
    for (size_t r = 0; r < t->rows; r++)
        for (size_t c = 0; c < t->stride; c++)
            data[r * t->stride + c] = fill && c < t->columns ? value_at(t, r, c) : -1;
    return data;
}

static bool tensor_is_right(const struct peer_tensor *t, const float *data)
{
    for (size_t r = 0; r < t->rows; r++)
        for (size_t c = 0; c < t->stride; c++)
            if (data[r * t->stride + c] != (c < t->columns ? value_at(t, r, c) : -1))
                return false;
    return true;
}

/* ---- what is sent comes ---- */

struct talk {
    struct pair *pair;
    unsigned rank;
    size_t stride_more; /* padding between rows */
    uint64_t steps;
    bool on_data_thread;
    tally_status status;
    struct tally_error err;
    pthread_t thread;
};

static tally_status send_one(struct talk *talk, bool backward, uint64_t step, uint32_t leaf)
{
    struct peers *peers = peers_rpc_peers(talk->pair->peers[talk->rank]);
    struct peer_tensor t = tensor_of(talk->pair, backward, step, leaf);
    uint64_t ticket;
    t.stride += talk->stride_more;
    t.sums = (struct kernel_loss){0.1 * leaf, (double)step, 3};
    float *data = tensor_new(&t, true);
    tally_status status = peers->send(peers, 1 - talk->rank, &t, data, &ticket, &talk->err);
    if (!status) {
        /* It may be overwritten now, and what is sent is as it was. */
        status = peers->flush(peers, talk->stride_more ? UINT64_MAX : ticket, &talk->err);
        memset(data, 0, t.rows * t.stride * sizeof *data);
    }
    if (!status)
        free(data);
    return status;
}

static tally_status receive_one(struct talk *talk, bool backward, uint64_t step, uint32_t leaf)
{
    struct peers *peers = peers_rpc_peers(talk->pair->peers[talk->rank]);
    struct peer_tensor t = tensor_of(talk->pair, backward, step, leaf);
    t.stride += talk->stride_more;
    float *data = tensor_new(&t, false);
    tally_status status = peers->receive(peers, 1 - talk->rank, &t, data, &talk->err);
    if (!status && !tensor_is_right(&t, data))
        status = tally_fail(&talk->err, TALLY_EINTERNAL, "other data than was sent");
    if (!status && backward && (t.sums.loss_sum != 0.1 * leaf || t.sums.weight != (double)step || t.sums.correct != 3))
        status = tally_fail(&talk->err, TALLY_EINTERNAL, "other sums than were sent");
    free(data);
    return status;
}

/* GPipe over four micro-batches. */
static void talk(void *context)
{
    struct talk *t = context;
    bool first = t->rank == 0;
    for (uint64_t step = 1; step <= t->steps; step++)
        for (unsigned half = 0; half < 2; half++)
            for (uint32_t leaf = 0; leaf < 4 && !t->status; leaf++)
                t->status =
                    first == (half == 0) ? send_one(t, half == 1, step, leaf) : receive_one(t, half == 1, step, leaf);
}

static void *talk_main(void *arg)
{
    struct talk *t = arg;
    if (t->on_data_thread)
        host_run(&t->pair->hosts[t->rank], talk, t);
    else
        talk(t);
    return NULL;
}

static void check_talk(uint32_t rows, uint32_t columns, size_t stride_more, bool first_on_data, bool second_on_data)
{
    struct pair *p = pair_open(rows, columns);
    struct talk talks[2];
    bool on_data[2] = {first_on_data, second_on_data};
    for (unsigned i = 0; i < 2; i++)
        connect_one(p, 1 - i, on_data[1 - i], WAIT_MS);
    for (unsigned i = 0; i < 2; i++) {
        talks[i] =
            (struct talk){.pair = p, .rank = i, .stride_more = stride_more, .steps = 12, .on_data_thread = on_data[i]};
        assert_int_equal(pthread_create(&talks[i].thread, NULL, talk_main, &talks[i]), 0);
    }
    for (unsigned i = 0; i < 2; i++) {
        pthread_join(talks[i].thread, NULL);
        if (talks[i].status)
            fail_msg("rank %u: %s", i, talks[i].err.message);
    }
    pair_close(p);
}

static void test_tensors_come_as_they_were(void **state)
{
    (void)state;
    check_talk(4, 7, 0, false, false);
    check_talk(4, 7, 0, true, true);
    check_talk(4, 7, 0, false, true);
}

static void test_padding_between_rows_stays(void **state)
{
    (void)state;
    check_talk(5, 7, 9, false, false); /* 7 floats lie 16 apart in the plan too */
    check_talk(5, 7, 9, true, true);
}

/* 1.5 MiB: two messages a tensor. */
static void test_large_tensors_come_in_parts(void **state)
{
    (void)state;
    check_talk(8, 48 * 1024, 0, false, false);
    check_talk(8, 48 * 1024, 0, true, true);
}

/* ---- room, deadlines, ends ---- */

static void test_what_fits_the_room_leaves_by_itself(void **state)
{
    (void)state;
    struct pair *p = pair_open(8, 48 * 1024);
    connect_one(p, 1, false, WAIT_MS);
    connect_one(p, 0, false, 300);
    struct peers *peers = peers_rpc_peers(p->peers[0]);
    uint32_t room = plan_peer_room(p->ranks[0].plan, 0, 1);
    struct peer_tensor t = tensor_of(p, false, 1, 0);
    struct tally_error err;
    float *data = tensor_new(&t, true);
    uint64_t ticket;
    for (t.micro_batch = 0; t.micro_batch < room; t.micro_batch++)
        if (peers->send(peers, 1, &t, data, &ticket, &err))
            fail_msg("%s", err.message);
    /* Nobody receives. */
    for (int i = 0; peers->flush(peers, UINT64_MAX, &err) == TALLY_ETIMEDOUT; i++)
        assert_true(i < 30);
    assert_int_equal(peers->send(peers, 1, &t, data, &ticket, &err), TALLY_ETIMEDOUT);
    char expected[128];
    snprintf(expected, sizeof expected,
             "w0 (stage 0) waited 0.3 s for room for activation %u of step 1 at w1 (stage 1) (edge 0, the output of a)",
             room);
    assert_string_equal(err.message, expected);
    free(data);
    pair_close(p);
}

static void test_a_wait_names_what_it_waits_for(void **state)
{
    (void)state;
    struct pair *p = pair_open(4, 7);
    connect_one(p, 1, false, 200);
    struct peers *peers = peers_rpc_peers(p->peers[1]);
    struct peer_tensor t = tensor_of(p, false, 41, 3);
    struct tally_error err;
    float *data = tensor_new(&t, false);
    assert_int_equal(peers->receive(peers, 0, &t, data, &err), TALLY_ETIMEDOUT);
    assert_string_equal(err.message, "w1 (stage 1) waited 0.2 s for activation 3 of step 41 from w0 (stage 0) (edge 0, "
                                     "the output of a)");
    t.evaluation = true;
    assert_int_equal(peers->receive(peers, 0, &t, data, &err), TALLY_ETIMEDOUT);
    assert_non_null(strstr(err.message, "for activation 3 of the evaluation at version 41 from w0"));
    free(data);
    pair_close(p);
}

static void *wait_main(void *arg)
{
    struct talk *t = arg;
    t->status = receive_one(t, false, 1, 0);
    return NULL;
}

static void test_the_end_of_the_job_ends_a_wait(void **state)
{
    (void)state;
    struct pair *p = pair_open(4, 7);
    connect_one(p, 1, false, WAIT_MS);
    struct talk waits = {.pair = p, .rank = 1};
    char text[256] = "";
    assert_int_equal(pthread_create(&waits.thread, NULL, wait_main, &waits), 0);
    for (int i = 0; i < 500 && !strstr(text, "activation 0 of step 1 from w0 (stage 0)"); i++) {
        usleep(10000);
        peers_rpc_activity(p->peers[1], text, sizeof text);
    }
    assert_non_null(strstr(text, "activation 0 of step 1 from w0 (stage 0)"));
    int64_t before = tally_now_ns();
    peers_rpc_interrupt(p->peers[1]);
    pthread_join(waits.thread, NULL);
    assert_int_equal(waits.status, TALLY_ECANCELLED);
    assert_true(tally_now_ns() - before < 2000000000);
    pair_close(p);
}

static void test_a_lost_peer_is_named(void **state)
{
    (void)state;
    struct pair *p = pair_open(4, 7);
    connect_one(p, 1, false, WAIT_MS);
    connect_one(p, 0, false, WAIT_MS);
    struct talk talks[2] = {{.pair = p, .rank = 0}, {.pair = p, .rank = 1}};
    assert_int_equal(send_one(&talks[0], false, 1, 0), TALLY_OK);
    assert_int_equal(receive_one(&talks[1], false, 1, 0), TALLY_OK);
    peers_rpc_close(p->peers[0]); /* its job has ended */
    p->peers[0] = NULL;
    assert_int_equal(receive_one(&talks[1], false, 1, 1), TALLY_EUNAVAIL);
    assert_non_null(strstr(talks[1].err.message, "w1 (stage 1) lost its stream "));
    assert_non_null(strstr(talks[1].err.message, "w0 (stage 0) at step 1"));
    pair_close(p);
}

/* ---- a peer that this test plays ---- */

struct player {
    struct rpc_queue *queue;
    struct rpc_channel *channel;
    struct rpc_stream *stream;
    unsigned credits;
    bool ended;
    struct tally_error end;
};

static void on_player_message(struct rpc_stream *stream, const struct rpc_message *message, void *user)
{
    struct player *player = user;
    player->credits += ((const Tally__V1__TensorAck *)message->header)->credits;
    rpc_stream_grant(stream, 1);
}

static void on_player_end(struct rpc_stream *stream, const struct tally_error *end, void *user)
{
    (void)stream;
    struct player *player = user;
    player->ended = true;
    player->end = *end;
}

static void player_open(struct player *player, const struct pair *p)
{
    static const struct rpc_stream_events events = {.on_message = on_player_message, .on_end = on_player_end};
    struct rpc_stream_options options = {.credits = 8};
    struct tally_error err;
    *player = (struct player){0};
    if (rpc_data_queue_new(&player->queue, &err) ||
        rpc_channel_new(p->hosts[1].address, NULL, &player->channel, &err) ||
        rpc_stream_open(player->channel, player->queue, &tally__v1__peers__descriptor, "Exchange", &events, player,
                        &options, &player->stream, &err))
        fail_msg("%s", err.message);
    rpc_stream_ref(player->stream);
}

static void player_close(struct player *player)
{
    if (!player->ended)
        rpc_stream_cancel(player->stream);
    for (int64_t until = tally_now_ns() + 5000000000; !player->ended && tally_now_ns() < until;)
        rpc_queue_poll(player->queue, until);
    assert_true(player->ended);
    rpc_stream_unref(player->stream);
    rpc_channel_free(player->channel);
    rpc_queue_free(player->queue);
}

static void player_hello(struct player *player, uint64_t generation, const char *from, uint32_t major)
{
    Tally__V1__Version version = TALLY__V1__VERSION__INIT;
    Tally__V1__TensorMessage m = TALLY__V1__TENSOR_MESSAGE__INIT;
    struct tally_error err;
    version.major = major;
    m.job = JOB;
    m.generation = generation;
    m.from = (char *)from;
    m.version = &version;
    if (rpc_stream_send(player->stream, &m.base, &err))
        fail_msg("%s", err.message);
}

/* Polls until so many credits came, or the end. */
static void player_await(struct player *player, unsigned credits)
{
    for (int64_t until = tally_now_ns() + 5000000000; player->credits < credits && !player->ended;) {
        assert_true(tally_now_ns() < until);
        rpc_queue_poll(player->queue, until);
    }
}

/* The tensor, rows x columns, with what belongs there. */
static void player_send(struct player *player, struct peer_tensor t, uint64_t generation)
{
    Tally__V1__TensorMessage m = TALLY__V1__TENSOR_MESSAGE__INIT;
    struct tally_error err;
    t.stride = t.columns;
    float *data = tensor_new(&t, true);
    m.job = JOB;
    m.generation = generation;
    m.step = t.step;
    m.micro_batch = t.micro_batch;
    m.edge = t.edge;
    m.direction = t.direction;
    m.rows = (uint32_t)t.rows;
    m.columns = (uint32_t)t.columns;
    m.data.data = (uint8_t *)data;
    m.data.len = t.rows * t.columns * sizeof *data;
    if (rpc_stream_send(player->stream, &m.base, &err))
        fail_msg("%s", err.message);
    while (rpc_stream_queued_messages(player->stream) > 0 && !player->ended)
        rpc_queue_poll(player->queue, tally_now_ns() + 10000000);
    free(data);
}

static void refused(struct pair *p, uint64_t generation, const char *from, uint32_t major, const char *why)
{
    struct player player;
    player_open(&player, p);
    player_hello(&player, generation, from, major);
    player_await(&player, UINT32_MAX);
    assert_true(player.ended);
    assert_non_null(strstr(player.end.message, why));
    player_close(&player);
}

static void test_strangers_are_refused(void **state)
{
    (void)state;
    struct pair *p = pair_open(4, 7);
    connect_one(p, 1, false, WAIT_MS);
    refused(p, GENERATION - 1, "w0", TALLY_PROTOCOL_MAJOR, "generation 2 of job 7: this worker is at generation 3");
    refused(p, GENERATION, "w0", TALLY_PROTOCOL_MAJOR + 1, "speaks protocol 2.0");
    refused(p, GENERATION, "w9", TALLY_PROTOCOL_MAJOR, "worker w9 has nothing to send to w1 (stage 1)");
    refused(p, GENERATION, "", TALLY_PROTOCOL_MAJOR, "the first message of an Exchange must say");
    struct player player;
    player_open(&player, p);
    player_hello(&player, GENERATION, "w0", TALLY_PROTOCOL_MAJOR);
    player_await(&player, 1);
    assert_int_equal(player.credits, plan_peer_room(p->ranks[1].plan, 0, 1));
    refused(p, GENERATION, "w0", TALLY_PROTOCOL_MAJOR, "worker w0 has a stream to w1 (stage 1) already");
    peers_rpc_close(p->peers[1]);
    p->peers[1] = NULL;
    refused(p, GENERATION, "w0", TALLY_PROTOCOL_MAJOR, "generation 3 of job 7 has ended at this worker");
    player_close(&player);
    pair_close(p);
}

static void test_a_stream_waits_for_its_job(void **state)
{
    (void)state;
    struct pair *p = pair_open(4, 7);
    struct player early, old;
    player_open(&early, p);
    player_hello(&early, GENERATION, "w0", TALLY_PROTOCOL_MAJOR);
    player_open(&old, p);
    player_hello(&old, GENERATION - 1, "w0", TALLY_PROTOCOL_MAJOR);
    rpc_queue_poll(early.queue, tally_now_ns() + 100000000);
    rpc_queue_poll(old.queue, tally_now_ns() + 100000000);
    assert_false(early.ended);
    connect_one(p, 1, false, WAIT_MS);
    player_await(&early, 1);
    assert_true(early.credits > 0);
    player_await(&old, UINT32_MAX);
    assert_non_null(strstr(old.end.message, "generation 2 of job 7"));
    player_close(&early);
    player_close(&old);
    pair_close(p);
}

static void test_what_comes_twice_counts_once(void **state)
{
    (void)state;
    struct pair *p = pair_open(4, 7);
    struct player player;
    connect_one(p, 1, false, WAIT_MS);
    player_open(&player, p);
    player_hello(&player, GENERATION, "w0", TALLY_PROTOCOL_MAJOR);
    player_await(&player, 1);
    unsigned room = player.credits;
    struct talk receiver = {.pair = p, .rank = 1};
    for (uint32_t leaf = 0; leaf < 4; leaf++) {
        player_send(&player, tensor_of(p, false, 1, leaf), GENERATION);
        player_send(&player, tensor_of(p, false, 1, leaf), GENERATION);
        assert_int_equal(receive_one(&receiver, false, 1, leaf), TALLY_OK);
    }
    player_send(&player, tensor_of(p, false, 1, 2), GENERATION); /* long done with */
    /* Each has given its credit back, those that were ignored too. */
    player_await(&player, room + 9);
    assert_int_equal(player.credits, room + 9);
    assert_false(player.ended);
    player_close(&player);
    pair_close(p);
}

/* What is sent, and how the stream and the job here end. */
static void check_fault(struct peer_tensor t, struct pair *p, uint64_t generation, const char *why, bool at_receive)
{
    struct player player;
    connect_one(p, 1, false, WAIT_MS);
    player_open(&player, p);
    player_hello(&player, GENERATION, "w0", TALLY_PROTOCOL_MAJOR);
    player_await(&player, 1);
    player_send(&player, t, generation);
    if (!at_receive) {
        player_await(&player, UINT32_MAX);
        assert_true(player.ended);
        assert_non_null(strstr(player.end.message, why));
    }
    struct talk receiver = {.pair = p, .rank = 1};
    tally_status status = receive_one(&receiver, false, 1, 0);
    assert_true(status == TALLY_EINVAL || status == TALLY_ESTATE);
    if (!strstr(receiver.err.message, why))
        fail_msg("%s", receiver.err.message);
    assert_non_null(strstr(receiver.err.message, "w0 (stage 0) sent"));
    assert_non_null(strstr(receiver.err.message, "w1 (stage 1)"));
    player_close(&player);
    pair_close(p);
}

static void test_a_wrong_shape_names_both(void **state)
{
    (void)state;
    struct pair *p = pair_open(4, 7);
    struct peer_tensor t = tensor_of(p, false, 1, 0);
    t.columns = 8;
    check_fault(t, p, GENERATION, "activation 0 of step 1 as 4 x 8 floats, expected at most 4 rows of 7", false);
    p = pair_open(4, 7);
    t = tensor_of(p, false, 1, 0);
    t.rows = 5;
    check_fault(t, p, GENERATION, "activation 0 of step 1 as 5 x 7 floats, expected at most 4 rows of 7", false);
    p = pair_open(4, 7);
    t = tensor_of(p, false, 1, 0);
    t.rows = 3;
    check_fault(t, p, GENERATION, "as 3 x 7 floats, w1 (stage 1) expects 4 x 7", true);
}

static void test_what_cannot_be_ends_the_stream(void **state)
{
    (void)state;
    struct pair *p = pair_open(4, 7);
    check_fault(tensor_of(p, true, 1, 0), p, GENERATION, "which does not go from stage 0 to stage 1", false);
    p = pair_open(4, 7);
    struct peer_tensor t = tensor_of(p, false, 1, 0);
    t.edge = 9;
    check_fault(t, p, GENERATION, "a tensor of edge 9 of 2", false);
    p = pair_open(4, 7);
    check_fault(tensor_of(p, false, 1, 0), p, GENERATION - 1, "generation 2 instead of job 7, generation 3", false);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tensors_come_as_they_were),
        cmocka_unit_test(test_padding_between_rows_stays),
        cmocka_unit_test(test_large_tensors_come_in_parts),
        cmocka_unit_test(test_what_fits_the_room_leaves_by_itself),
        cmocka_unit_test(test_a_wait_names_what_it_waits_for),
        cmocka_unit_test(test_the_end_of_the_job_ends_a_wait),
        cmocka_unit_test(test_a_lost_peer_is_named),
        cmocka_unit_test(test_strangers_are_refused),
        cmocka_unit_test(test_a_stream_waits_for_its_job),
        cmocka_unit_test(test_what_comes_twice_counts_once),
        cmocka_unit_test(test_a_wrong_shape_names_both),
        cmocka_unit_test(test_what_cannot_be_ends_the_stream),
    };
    rpc_global_init();
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    rpc_global_shutdown();
    return failed;
}
