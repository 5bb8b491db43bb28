#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/log.h"
#include "server/coordinator_internal.h"

/* Messages of a node that may be on their way while the loop is busy; a report is small. */
#define NODE_CREDITS 16

/* ---- losing a node ---- */

static void lose(struct session *session, const char *how)
{
    struct coordinator *c = session->coordinator;
    struct member *member = session->member;
    if (!member)
        return;
    session->member = NULL;
    uint64_t job = member->job;
    member->user = NULL;
    if (!c->closing) {
        log_info("%s %s was lost: %s", role_text(member->role), member->name, how);
        report_lost(c, job, member, how);
    }
    membership_remove(c->members, member);
    jobs_schedule(c);
}

void cluster_send(struct member *member, const Tally__V1__Order *order)
{
    struct session *session = member->user;
    struct tally_error err;
    /* Lost already; the job is told of it. */
    if (!session)
        return;
    tally_status status = rpc_stream_send(session->stream, &order->base, &err);
    if (status == TALLY_OK || status == TALLY_ECANCELLED)
        return;
    log_warn("%s %s: an order cannot be sent: %s", role_text(member->role), member->name, err.message);
    rpc_stream_cancel(session->stream); /* on_end takes it for lost */
}

/* ---- what a node says ---- */

static void refuse(struct session *session, const struct tally_error *err)
{
    char peer[RPC_ADDRESS_MAX];
    rpc_stream_peer(session->stream, peer, sizeof peer);
    log_warn("a node at %s is refused: %s", peer, err->message);
    session->refused = true;
    rpc_stream_finish_error(session->stream, err);
}

static void take_register(struct session *session, const Tally__V1__Register *request)
{
    struct coordinator *c = session->coordinator;
    struct member *member = NULL, *replaced = NULL;
    struct tally_error err;
    tally_status status = membership_add(c->members, request, tally_now_ns(), &member, &replaced, &err);
    if (status == TALLY_OK && replaced) {
        struct session *old = replaced->user;
        old->refused = true;
        rpc_stream_finish(old->stream, TALLY_ESTATE, "the node has registered again");
        lose(old, "it has registered again");
        status = membership_add(c->members, request, tally_now_ns(), &member, &replaced, &err);
    }
    if (status != TALLY_OK) {
        refuse(session, &err);
        return;
    }
    member->user = session;
    session->member = member;
    Tally__V1__Registered registered = TALLY__V1__REGISTERED__INIT;
    registered.lease_ms = (uint32_t)(c->lease_ns / 1000000);
    registered.epoch = store_epoch(c->store);
    Tally__V1__Order order = TALLY__V1__ORDER__INIT;
    order.body_case = TALLY__V1__ORDER__BODY_REGISTERED;
    order.registered = &registered;
    cluster_send(member, &order);
    log_info("%s %s joined: %s, process %" PRIu32 "%s%s", role_text(member->role), member->name, member->address,
             member->pid, member->role == TALLY__V1__ROLE__WORKER ? ", " : "",
             member->role == TALLY__V1__ROLE__WORKER ? isa_text(member->isa) : "");
    jobs_schedule(c);
}

static void take_heartbeat(struct session *session, const Tally__V1__Heartbeat *heartbeat)
{
    membership_heard(session->coordinator->members, session->member, heartbeat->activity, tally_now_ns());
    Tally__V1__HeartbeatAck ack = TALLY__V1__HEARTBEAT_ACK__INIT;
    ack.seq = heartbeat->seq;
    Tally__V1__Order order = TALLY__V1__ORDER__INIT;
    order.body_case = TALLY__V1__ORDER__BODY_HEARTBEAT_ACK;
    order.heartbeat_ack = &ack;
    cluster_send(session->member, &order);
}

static void on_message(struct rpc_stream *stream, const struct rpc_message *message, void *user)
{
    struct session *session = user;
    struct coordinator *c = session->coordinator;
    const Tally__V1__NodeMessage *said = (const Tally__V1__NodeMessage *)message->header;
    if (session->refused || c->closing)
        return;
    rpc_stream_grant(stream, 1);
    bool registers = said->body_case == TALLY__V1__NODE_MESSAGE__BODY_REGISTER;
    if (registers == (session->member != NULL)) {
        struct tally_error err;
        tally_fail(&err, TALLY_EINVAL,
                   registers ? "a node registers once a stream" : "a node speaks before it has registered");
        lose(session, "it registered twice on one stream");
        refuse(session, &err);
    } else if (registers) {
        take_register(session, said->register_);
    } else if (said->body_case == TALLY__V1__NODE_MESSAGE__BODY_HEARTBEAT) {
        take_heartbeat(session, said->heartbeat);
    } else {
        membership_heard(c->members, session->member, NULL, tally_now_ns());
        report_take(c, session->member, said);
    }
}

static void on_half_close(struct rpc_stream *stream, void *user)
{
    struct session *session = user;
    if (session->refused)
        return;
    lose(session, "it left the cluster");
    session->refused = true;
    rpc_stream_finish(stream, TALLY_OK, NULL);
}

static void on_end(struct rpc_stream *stream, const struct tally_error *end, void *user)
{
    (void)stream;
    (void)end;
    struct session *session = user;
    struct coordinator *c = session->coordinator;
    lose(session, "its connection closed");
    if (session->previous)
        session->previous->next = session->next;
    else
        c->sessions = session->next;
    if (session->next)
        session->next->previous = session->previous;
    free(session);
}

static void on_join(struct rpc_stream *stream, void *user)
{
    static const struct rpc_stream_events events = {
        .on_message = on_message, .on_half_close = on_half_close, .on_end = on_end};
    static const struct rpc_stream_options options = {.credits = NODE_CREDITS};
    struct coordinator *c = user;
    struct session *session = c->closing ? NULL : calloc(1, sizeof *session);
    if (!session) {
        rpc_stream_finish(stream, c->closing ? TALLY_EUNAVAIL : TALLY_ENOMEM,
                          c->closing ? "the coordinator is ending" : "no memory for another node");
        return;
    }
    session->coordinator = c;
    session->stream = stream;
    session->opened_ns = tally_now_ns();
    session->next = c->sessions;
    if (session->next)
        session->next->previous = session;
    c->sessions = session;
    rpc_stream_accept(stream, &events, session, &options);
}

const struct rpc_method cluster_methods[] = {{.name = "Join", .on_open = on_join}};
const size_t cluster_method_count = 1;

/* ---- time ---- */

void cluster_tick(struct coordinator *c, int64_t now_ns)
{
    struct member *member;
    while ((member = membership_expired(c->members, now_ns)) != NULL) {
        struct session *session = member->user;
        char how[64];
        snprintf(how, sizeof how, "no heartbeat for %g s", (double)c->lease_ns / 1e9);
        session->refused = true;
        lose(session, how);
        rpc_stream_finish(session->stream, TALLY_ETIMEDOUT, how);
    }
    for (struct session *session = c->sessions, *next; session; session = next) {
        next = session->next;
        if (session->member || session->refused || now_ns - session->opened_ns < c->lease_ns)
            continue;
        session->refused = true;
        rpc_stream_finish(session->stream, TALLY_ETIMEDOUT, "it has not registered in time");
    }
}

void cluster_close(struct coordinator *c)
{
    for (struct session *session = c->sessions; session; session = session->next) {
        if (!session->refused)
            rpc_stream_finish(session->stream, TALLY_EUNAVAIL, "the coordinator is ending");
    }
}
