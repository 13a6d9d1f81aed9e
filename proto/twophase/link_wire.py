"""Messages of the control side of a KV link, to core types and back."""

from core import link
from core.errors import TransferFailure
from core.link import LinkDown, LinkUp, Piece, Span
from core.request import RequestId, WorkerName
from twophase import errors
from twophase.info_wire import layout_from_wire, layout_to_wire
from twophase.v1 import worker_pb2 as pb


def up_to_wire(message: LinkUp) -> pb.LinkUp:
    """What a prefill worker says, as a message."""
    match message:
        case link.OpenLink():
            return pb.LinkUp(open=_open_to_wire(message))
        case link.Piece():
            return pb.LinkUp(piece=_piece_to_wire(message))
        case link.Begin():
            return pb.LinkUp(
                begin=pb.BeginTransfer(request_id=message.request_id, epoch=message.epoch)
            )
        case link.Seal():
            return pb.LinkUp(
                seal=pb.Seal(
                    request_id=message.request_id,
                    epoch=message.epoch,
                    num_pieces=message.num_pieces,
                    first_token_id=message.first_token_id,
                )
            )
        case link.Abort():
            return pb.LinkUp(abort=_abort_to_wire(message))
        case link.AbortAck():
            return pb.LinkUp(abort_ack=_abort_ack_to_wire(message))


def up_from_wire(message: pb.LinkUp) -> LinkUp:
    """What a prefill worker says, from its message."""
    match message.WhichOneof("message"):
        case "open":
            return _open_from_wire(message.open)
        case "piece":
            return _piece_from_wire(message.piece)
        case "begin":
            return link.Begin(RequestId(message.begin.request_id), message.begin.epoch)
        case "seal":
            seal = message.seal
            return link.Seal(
                RequestId(seal.request_id), seal.epoch, seal.num_pieces, seal.first_token_id
            )
        case "abort":
            return _abort_from_wire(message.abort)
        case "abort_ack":
            return _abort_ack_from_wire(message.abort_ack)
    raise ValueError("a link message without content")


def down_to_wire(message: LinkDown) -> pb.LinkDown:
    """What a decode worker says, as a message."""
    match message:
        case link.LinkOpened():
            return pb.LinkDown(
                opened=pb.LinkOpened(
                    kind=message.kind,
                    reason=message.reason,
                    parameters=dict(message.parameters),
                    layout=layout_to_wire(message.layout),
                    num_blocks=message.num_blocks,
                )
            )
        case link.LinkRefused():
            return pb.LinkDown(link_refused=errors.to_wire(message.error))
        case link.Granted():
            return pb.LinkDown(
                granted=pb.TransferGranted(request_id=message.request_id, epoch=message.epoch)
            )
        case link.PieceAck():
            return pb.LinkDown(
                piece_ack=pb.PieceAck(
                    request_id=message.request_id, epoch=message.epoch, index=message.index
                )
            )
        case link.Sealed():
            return pb.LinkDown(sealed=pb.Sealed(request_id=message.request_id, epoch=message.epoch))
        case link.TransferRefused():
            return pb.LinkDown(
                refused=pb.TransferRefused(
                    request_id=message.request_id,
                    epoch=message.epoch,
                    reason=message.reason.value,
                    detail=message.detail,
                )
            )
        case link.Abort():
            return pb.LinkDown(abort=_abort_to_wire(message))
        case link.AbortAck():
            return pb.LinkDown(abort_ack=_abort_ack_to_wire(message))


def down_from_wire(message: pb.LinkDown) -> LinkDown:
    """What a decode worker says, from its message."""
    match message.WhichOneof("message"):
        case "opened":
            opened = message.opened
            return link.LinkOpened(
                opened.kind,
                opened.reason,
                tuple(sorted(opened.parameters.items())),
                layout_from_wire(opened.layout),
                opened.num_blocks,
            )
        case "link_refused":
            return link.LinkRefused(errors.from_wire(message.link_refused))
        case "granted":
            return link.Granted(RequestId(message.granted.request_id), message.granted.epoch)
        case "piece_ack":
            ack = message.piece_ack
            return link.PieceAck(RequestId(ack.request_id), ack.epoch, ack.index)
        case "sealed":
            return link.Sealed(RequestId(message.sealed.request_id), message.sealed.epoch)
        case "refused":
            refused = message.refused
            reason = TransferFailure(refused.reason)
            return link.TransferRefused(
                RequestId(refused.request_id), refused.epoch, reason, refused.detail
            )
        case "abort":
            return _abort_from_wire(message.abort)
        case "abort_ack":
            return _abort_ack_from_wire(message.abort_ack)
    raise ValueError("a link message without content")


def _open_to_wire(message: link.OpenLink) -> pb.OpenLink:
    return pb.OpenLink(
        prefill_worker=message.prefill_worker,
        incarnation=message.incarnation,
        decode_incarnation=message.decode_incarnation,
        layout=layout_to_wire(message.layout),
        backend=message.backend,
        host_id=message.host_id,
        device=message.device,
        has_nixl=message.has_nixl,
        has_rdma=message.has_rdma,
        card=message.card,
        reachable_cards=message.reachable_cards,
    )


def _open_from_wire(message: pb.OpenLink) -> link.OpenLink:
    return link.OpenLink(
        prefill_worker=WorkerName(message.prefill_worker),
        incarnation=message.incarnation,
        decode_incarnation=message.decode_incarnation,
        layout=layout_from_wire(message.layout),
        backend=message.backend,
        host_id=message.host_id,
        device=message.device,
        has_nixl=message.has_nixl,
        has_rdma=message.has_rdma,
        card=message.card,
        reachable_cards=tuple(message.reachable_cards),
    )


def _piece_to_wire(piece: Piece) -> pb.PieceHeader:
    return pb.PieceHeader(
        request_id=piece.request_id,
        epoch=piece.epoch,
        index=piece.index,
        first_layer=piece.span.first_layer,
        num_layers=piece.span.num_layers,
        first_block=piece.span.first_block,
        num_blocks=piece.span.num_blocks,
        num_bytes=piece.num_bytes,
        checksum=piece.checksum,
    )


def _piece_from_wire(message: pb.PieceHeader) -> Piece:
    return Piece(
        request_id=RequestId(message.request_id),
        epoch=message.epoch,
        index=message.index,
        span=Span(message.first_layer, message.num_layers, message.first_block, message.num_blocks),
        num_bytes=message.num_bytes,
        checksum=message.checksum,
    )


def _abort_to_wire(message: link.Abort) -> pb.AbortTransfer:
    return pb.AbortTransfer(
        request_id=message.request_id,
        epoch=message.epoch,
        reason=message.reason.value,
        detail=message.detail,
    )


def _abort_from_wire(message: pb.AbortTransfer) -> link.Abort:
    reason = TransferFailure(message.reason)
    return link.Abort(RequestId(message.request_id), message.epoch, reason, message.detail)


def _abort_ack_to_wire(message: link.AbortAck) -> pb.AbortAck:
    return pb.AbortAck(request_id=message.request_id, epoch=message.epoch)


def _abort_ack_from_wire(message: pb.AbortAck) -> link.AbortAck:
    return link.AbortAck(RequestId(message.request_id), message.epoch)
