"""One example of each message of the protocol with its bytes: what tests hold the code to, and the documents show."""

import struct

from evenflow.control.wire import (
    NO_SLOT,
    Abort,
    BatchPlan,
    ClientHello,
    ClientPing,
    End,
    Fatal,
    FromClient,
    FromWorker,
    Heartbeat,
    Hello,
    IterationRecord,
    KillWorker,
    LauncherHello,
    Logprobs,
    Merged,
    Owned,
    Probe,
    Quit,
    Redial,
    Refused,
    Register,
    RequestRow,
    Result,
    Resync,
    Run,
    Sample,
    Sampling,
    StageTimes,
    Start,
    Started,
    Status,
    StatusReply,
    Submit,
    Subscribe,
    Terms,
    Tick,
    ToClient,
    TokenLogprobs,
    ToWorker,
    Unknown,
    Welcome,
    WorkerExited,
    decode_from_client,
    decode_from_worker,
    decode_record,
    decode_to_client,
    decode_to_worker,
)

#: Which decoder takes which messages.
DECODERS = [
    (ToWorker, decode_to_worker),
    (FromWorker, decode_from_worker),
    (ToClient, decode_to_client),
    (FromClient, decode_from_client),
    (IterationRecord, decode_record),
]


def u16(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}H", *values)


def u32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def u64(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def f32(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


GOLDEN = [
    (
        Start(7, 2, 4096, 16, 256, 512, 8192, "/run/x"),
        "99010702cd100010cd0100cd0200cd2000a62f72756e2f78",
    ),
    (
        Register(3, 9, 2**40, u32(1, 70000), 2, 0, u32(5), 64, 4, (2, 7), Sampling(0.5, 40, 0.25, 2**64 - 1, 1)),
        "9c020309cf0000010000000000c40801000000701101000200c4040500000040049202079dcb3fe00000000000"
        "0028cb3fd0000000000000cfffffffffffffffff01cb0000000000000000cb3ff0000000000000cb0000000000000000"
        "cb0000000000000000c400c400ffff",
    ),
    (
        Register(0, 1, 1, u32(8), 1, 0, u32(0), 2),
        "9c02000101c404080000000100c404000000000200909dcb000000000000000000cb3ff00000000000000000"
        "cb0000000000000000cb3ff0000000000000cb0000000000000000cb0000000000000000c400c400ffff",
    ),
    (
        Register(
            slot=0,
            generation=1,
            request=1,
            tokens=u32(8),
            prompt_len=1,
            computed=0,
            blocks=u32(0),
            max_len=2,
            sampling=Sampling(
                0.5,
                0,
                1.0,
                7,
                1,
                0.25,
                1.5,
                -0.5,
                2.0,
                u32(9, 70000),
                f32(-100.0, 0.5),
                logprobs=3,
                prompt_logprobs=0,
            ),
        ),
        "9c02000101c404080000000100c404000000000200909dcb3fe000000000000000cb3ff00000000000000701"
        "cb3fd0000000000000cb3ff8000000000000cbbfe0000000000000cb4000000000000000c408090000007011"
        "0100c4080000c8c20000003f0300",
    ),
    (
        BatchPlan(7, 300, 1, b"\x05\x80", u16(2), u32(9), u16(4), u32(512), u16(1, 6)),
        "9a0307cd012c01c4020580c4020200c40409000000c4020400c40400020000c40401000600",
    ),
    (
        Heartbeat(7, 2**63),
        "930407cf8000000000000000",
    ),
    (
        Redial(12),
        "92050c",
    ),
    (
        Quit("done"),
        "9306a4646f6e65c2",
    ),
    (
        Quit("taken", True),
        "9306a574616b656ec3",
    ),
    (
        Terms(2, 2, 16, 256, 128, "smollm2-135m"),
        "9709020210cd0100cc80ac736d6f6c6c6d322d3133356d",
    ),
    (
        Probe(1, 3, 1, 0, 2),
        "961a0103010002",
    ),
    (
        KillWorker(1, 0, 0, 4242),
        "9507010000cd1092",
    ),
    (
        Fatal("lower the KV memory"),
        "9208b36c6f77657220746865204b56206d656d6f7279",
    ),
    (
        Hello(
            *(1, 0, 1, 0, 2, 4242, "smollm2-135m", (2,), 16, 4096, 8192, 4096, 8192, 49152),
            *("cpu", 32, 99, True, "node7/x"),
        ),
        "dc0014100100010002cd1092ac736d6f6c6c6d322d3133356d910210cd1000cd2000cd1000cd2000cdc000a363707520"
        "63c3a76e6f6465372f78",
    ),
    (
        Started(7, [Sample(256, 32896, 0, 0, 81000), Sample(0, 0, 8, 16384, 12000)]),
        "9311079295cd0100cd80800000ce00013c6895000008cd4000cd2ee0",
    ),
    (
        Result(7, 300, 1, 10, 20, 70000, 5, 3, u32(0, 11, 12), u16(2), 0xDEADBEEF),
        "9d1207cd012c010a14ce000111700503c40c000000000b0000000c000000c4020200cedeadbeef90",
    ),
    (
        Result(7, 301, 0, 1, 2, 3, 4),
        "9d1207cd012d000102030400c400c400c090",
    ),
    (
        Result(
            *(7, 302, 0, 1, 2, 3, 4, 0),
            ids=u32(11),
            logprobs=[
                Logprobs(0, 5, f32(-0.5), u32(2), u32(12), f32(-0.25)),
                Logprobs(1, 1, f32(-1.0, -2.0), u32(1, 3)),
            ],
        ),
        "9d1207cd012e000102030400c4040b000000c400c092960005c404000000bfc40402000000c4040c000000c404000080be"
        "960101c408000080bf000000c0c4080100000003000000c400c400",
    ),
    (
        Resync(7, 301, "step 303 came"),
        "941407cd012dad73746570203330332063616d65",
    ),
    (
        LauncherHello(1, 99),
        "93180163",
    ),
    (
        WorkerExited(1, 0, 0, 4242, -9),
        "9619010000cd1092f7",
    ),
    (
        ClientHello(1, "gateway", 2**62),
        "942001a767617465776179cf4000000000000000",
    ),
    (
        Submit(5, "cmpl-1", u32(1, 2, 3), 2, 16, Sampling(1.0, 0, 1.0, 7, 0), (0,), 1, b"salt"),
        "dc00102105a6636d706c2d31c40c01000000020000000300000002109dcb3ff000000000000000cb3ff00000000000"
        "000700cb0000000000000000cb3ff0000000000000cb0000000000000000cb0000000000000000c400c400ffff"
        "910001c40473616c74c0a00000a000",
    ),
    (
        Submit(
            6, "cmpl-2", u32(1), 1, 16, leader=2**64 - 1, tenant="alice", priority=-5, deadline_ms=30_000, tbt_ms=80
        ),
        "dc00102106a6636d706c2d32c4040100000001109dcb000000000000000000cb3ff00000000000000000cb0000000000"
        "000000cb3ff0000000000000cb0000000000000000cb0000000000000000c400c400ffff9000c400cfffffffffffffffff"
        "a5616c696365fbcd7530a050",
    ),
    (
        Abort(5),
        "922205",
    ),
    (
        Status(3, 8),
        "93230308",
    ),
    (
        Subscribe(250),
        "9324ccfa00",
    ),
    (
        ClientPing(),
        "9125",
    ),
    (
        Welcome(1, 77, "smollm2-135m", True, 8192, 49152, 16, 65536, 128, 256, (2,), 2**62, 8192, "ipc:///e"),
        "9f30014dac736d6f6c6c6d322d3133356dc3cd2000cdc00010ce00010000cc80cd01009102cf4000000000000000cd2000"
        "a86970633a2f2f2f65",
    ),
    (
        Tick(4, 300, b"\x06", True, u32(0, 11, 12), u16(1), u64(5), [End(6, 2, "stop", 9, 16)], 1),
        "9b3104cd012cc40106c3c40c000000000b0000000c000000c4020100c408050000000000000091960602a473746f700910a00190",
    ),
    (
        Tick(
            *(5, 301, b"", False, b""),
            logprobs=[TokenLogprobs(5, 1, f32(-1.0, -2.0), u32(1, 3), u32(7, 8), f32(-1.0, -0.5))],
        ),
        "9b3105cd012dc400c2c400c400c400900091960501c408000080bf000000c0c4080100000003000000c4080700000008000000"
        "c408000080bf000000bf",
    ),
    (
        Merged(
            5,
            [Run(5, u32(11, 12)), Run(6, u32(13))],
            [End(5, NO_SLOT, "length", 2)],
            [Owned(1, u16(2), u64(6))],
            [TokenLogprobs(5, 8, f32(-1.0, -0.5), u32(3, 1))],
        ),
        "963505929205c4080b0000000c0000009206c4040d000000919605cdffffa66c656e6774680200a0919301c4020200c40806"
        "0000000000000091960508c408000080bf000000bfc4080300000001000000c400c400",
    ),
    (
        Refused(5, "too_long", "tokens", "at most 8192", 0),
        "963205a8746f6f5f6c6f6e67a6746f6b656e73ac6174206d6f7374203831393200",
    ),
    (
        Refused(None, "protocol", "", "version 9", 1000),
        "9632c0a870726f746f636f6ca0a976657273696f6e2039cd03e8",
    ),
    (
        StatusReply(
            *(3, 77, "smollm2-135m", True, False, {"running": 2.0}, ["up"]),
            [RequestRow("r", None, "waiting", 9, 0, 0, 0, 16, 250)],
        ),
        "9933034dac736d6f6c6c6d322d3133356dc3c281a772756e6e696e67cb400000000000000091a275709199a172c0a777616974696e67"
        "0900000010ccfa",
    ),
    (
        Unknown(77),
        "92344d",
    ),
    (
        IterationRecord(
            *(1, 7, 300, 0, 10, 20, 90, [StageTimes(21, 30, 70, 5, 3)]),
            *(260, 256, 1, 4, 512, 70000, 2, 900, 257, 100, 20, 30, 1, 41000),
        ),
        "dc0017400107cd012c000a145a9195151e460503cd0104cd01000104cd0200ce0001117002cd0384cd010164141e01cda028",
    ),
]
