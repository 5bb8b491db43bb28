#include "proto/rpc.h"

#include <grpc/status.h>

int rpc_status_to_grpc(tally_status status)
{
    switch (status) {
    case TALLY_OK:
        return GRPC_STATUS_OK;
    case TALLY_EINVAL:
        return GRPC_STATUS_INVALID_ARGUMENT;
    case TALLY_ENOTFOUND:
        return GRPC_STATUS_NOT_FOUND;
    case TALLY_EEXIST:
        return GRPC_STATUS_ALREADY_EXISTS;
    case TALLY_EIO:
        return GRPC_STATUS_DATA_LOSS; /* the nearest: what was asked for cannot be read or kept */
    case TALLY_ENOMEM:
        return GRPC_STATUS_RESOURCE_EXHAUSTED;
    case TALLY_ETIMEDOUT:
        return GRPC_STATUS_DEADLINE_EXCEEDED;
    case TALLY_EUNAVAIL:
        return GRPC_STATUS_UNAVAILABLE;
    case TALLY_ECANCELLED:
        return GRPC_STATUS_CANCELLED;
    case TALLY_EDENIED:
        return GRPC_STATUS_PERMISSION_DENIED;
    case TALLY_EUNSUPPORTED:
        return GRPC_STATUS_UNIMPLEMENTED;
    case TALLY_ESTATE:
        return GRPC_STATUS_FAILED_PRECONDITION;
    case TALLY_EINTERNAL:
        break;
    }
    return GRPC_STATUS_INTERNAL;
}

tally_status rpc_status_from_grpc(int code)
{
    switch (code) {
    case GRPC_STATUS_OK:
        return TALLY_OK;
    case GRPC_STATUS_CANCELLED:
        return TALLY_ECANCELLED;
    case GRPC_STATUS_INVALID_ARGUMENT:
    case GRPC_STATUS_OUT_OF_RANGE:
        return TALLY_EINVAL;
    case GRPC_STATUS_DEADLINE_EXCEEDED:
        return TALLY_ETIMEDOUT;
    case GRPC_STATUS_NOT_FOUND:
        return TALLY_ENOTFOUND;
    case GRPC_STATUS_ALREADY_EXISTS:
        return TALLY_EEXIST;
    case GRPC_STATUS_PERMISSION_DENIED:
    case GRPC_STATUS_UNAUTHENTICATED:
        return TALLY_EDENIED;
    case GRPC_STATUS_RESOURCE_EXHAUSTED:
        return TALLY_ENOMEM;
    case GRPC_STATUS_FAILED_PRECONDITION:
    case GRPC_STATUS_ABORTED:
        return TALLY_ESTATE;
    case GRPC_STATUS_UNIMPLEMENTED:
        return TALLY_EUNSUPPORTED;
    case GRPC_STATUS_UNAVAILABLE:
        return TALLY_EUNAVAIL;
    case GRPC_STATUS_DATA_LOSS:
        return TALLY_EIO;
    default:
        return TALLY_EINTERNAL;
    }
}
