#ifndef WORKER_PEERS_SERVICE_H
#define WORKER_PEERS_SERVICE_H
/*
 * What a worker serves to others: Peers.Exchange, on the data queue, for as long as the process lives. Streams are
 * handed to the job that they name. One that comes before its job was opened here waits for it; one of an older
 * generation, or of a job that has ended here, is refused with the reason. All of it belongs to the data thread, but
 * for new and free.
 */
#include "common/error.h"
#include "proto/rpc.h"

struct peers_service;

/* A job that takes streams. Lent: embed it. Its functions are called on the data thread. */
struct peers_listener {
    uint64_t job, generation;
    /* A stream whose first message came, from the worker of this name: what it is to the listener, for the functions
     * below. An error refuses it. */
    tally_status (*on_open)(struct peers_listener *listener, struct rpc_stream *stream, const char *from,
                            void **ret_inlet, struct tally_error *err);
    /* A message behind the first. An error ends the stream. */
    tally_status (*on_message)(void *inlet, const struct rpc_message *message, struct tally_error *err);
    /* It was lost, or ended by the sender or for an error of on_message: end says why. Not called after
     * peers_service_remove. */
    void (*on_end)(void *inlet, const struct tally_error *end);
};

tally_status peers_service_new(struct rpc_queue *data_queue, struct peers_service **ret_service,
                               struct tally_error *err);
/* After the server's end. NULL is allowed. */
void peers_service_free(struct peers_service *service);
/* Before the server starts. */
tally_status peers_service_serve(struct peers_service *service, struct rpc_server *server, struct tally_error *err);

/* The job's streams, those that wait too, are its from now on: on_open may be called inside. One job at a time. */
void peers_service_add(struct peers_service *service, struct peers_listener *listener);
/* Ends the job's streams and forgets it; those that come later are refused. */
void peers_service_remove(struct peers_service *service, struct peers_listener *listener);
#endif
