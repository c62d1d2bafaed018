"""An ONNX model of one node, in protobuf's wire format: ONNX Runtime comes without the package that writes models.

Field numbers are those of onnx.proto (ModelProto, GraphProto, NodeProto, AttributeProto, ValueInfoProto, TypeProto).
"""

FLOAT, INT32, FLOAT16 = 1, 6, 10  # TensorProto.DataType
IR_VERSION = 10
INT_ATTRIBUTE = 2  # AttributeProto.AttributeType


def varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; the top bit says that more follow."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number: int, value: int | str | bytes) -> bytes:
    """One field: an integer, or text or a message with its length in front."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    content = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(content)) + content


def tensor(number: int, name: str, element: int) -> bytes:
    """A graph's input or output of any shape."""
    return field(number, field(1, name) + field(2, field(1, field(1, element))))


def one_node(
    operator: str,
    inputs: dict[str, int],
    outputs: dict[str, int],
    attributes: dict[str, int],
    domain: str = "",
    opset: int = 23,
) -> bytes:
    """A model that applies one operator. Inputs and outputs are names with their element types."""
    node = b"".join(field(1, name) for name in inputs) + b"".join(field(2, name) for name in outputs)
    node += field(4, operator)
    for name, value in attributes.items():
        node += field(5, field(1, name) + field(3, value) + field(20, INT_ATTRIBUTE))
    node += field(7, domain)
    graph = field(1, node) + field(2, operator)
    graph += b"".join(tensor(11, name, element) for name, element in inputs.items())
    graph += b"".join(tensor(12, name, element) for name, element in outputs.items())
    opsets = field(8, field(1, "") + field(2, opset))
    if domain:
        opsets += field(8, field(1, domain) + field(2, 1))
    return field(1, IR_VERSION) + field(7, graph) + opsets
