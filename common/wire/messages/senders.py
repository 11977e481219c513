"""First fields of messages: the incarnation that sends, or an attempt of a request."""

from common.wire.values.fields import Count, Epoch, RequestId, WireStruct, WorkerId


class FromWorker(WireStruct):
    """A message in the name of a worker's incarnation."""

    worker_id: WorkerId
    epoch: Epoch


class FromMemoryServer(WireStruct):
    """A message in the name of a memory server's incarnation."""

    server_id: WorkerId
    epoch: Epoch


class FromOperator(WireStruct):
    """A message in the name of an operator."""

    operator_id: WorkerId
    epoch: Epoch


class FromFront(WireStruct):
    """A message in the name of a front's session; `epoch` is the session's."""

    front_id: WorkerId
    epoch: Epoch


class OfAttempt(WireStruct):
    """A message about an attempt of a request."""

    request_id: RequestId
    attempt: Count
