"""What a hostile program tries, as data: the worker's self-test and the tests run the same list.

Each body gets the names of the decoys (PORT, SOCKET, SECRET …) and comes to its end only when the attack works; an
exception stops it, or its own end. `ESSENTIAL` are tried wherever a pool starts, all of them where a worker does.
"""

from grpo_engine.reward.sandbox.attack import Attack

_NETWORK = (
    Attack("TCP to the host", "socket.create_connection(('127.0.0.1', PORT), 2)", essential=True),
    Attack("TCP over IPv6", "socket.create_connection(('::1', PORT), 2)"),
    Attack("UDP out", "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))"),
    Attack("raw socket", "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)"),
    Attack("netlink socket", "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)"),
    Attack("name lookup", "assert socket.getaddrinfo('cohort.invalid', 80) or True"),
    Attack("listening", "s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen()"),
    Attack("the broker's Unix socket", "socket.socket(socket.AF_UNIX).connect(SOCKET)", essential=True),
    Attack("abstract Unix socket", "socket.socket(socket.AF_UNIX).connect(chr(0) + ABSTRACT)", essential=True),
    Attack(
        "datagram to the host's socket",
        """
a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
a.sendto(b'x', DATAGRAM)
""",
    ),
    Attack(
        "datagram by sendmsg",
        """
a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
a.sendmsg([b'x'], [], 0, DATAGRAM)
""",
    ),
    Attack("vsock", "socket.socket(40, socket.SOCK_STREAM).connect((2, 1))"),
)

_FILES = (
    Attack("/etc/passwd", "assert open('/etc/passwd').read()", essential=True),
    Attack("a secret that all may read", "assert 'secret' in open(SECRET).read()", essential=True),
    Attack("listing the host's folder", "assert os.listdir(os.path.dirname(SECRET))"),
    Attack("the project's own code", "assert open(OWN_CODE).read()"),
    Attack("installed packages", "assert os.listdir(PACKAGES)"),
    Attack("writing outside", "open(OUTSIDE, 'w').write('x')", essential=True),
    Attack("writing into the standard library", "open(os.__file__, 'a').write('x')"),
    Attack("a folder outside", "os.mkdir(OUTSIDE)"),
    Attack(
        "symbolic link out",
        """
os.symlink(SECRET, 'link')
assert open('link').read()
""",
    ),
    Attack(
        "hard link out",
        """
os.link(SECRET, 'link')
assert open('link').read()
""",
    ),
    Attack("moving a file in", "os.rename(SECRET, 'mine')"),
    Attack("dots out of the folder", "assert 'secret' in open('../' * 20 + SECRET.lstrip('/')).read()"),
    Attack("changing a mode", "os.chmod(SECRET, 0o600)"),
    Attack("changing an owner", "os.chown(SECRET, os.getuid(), os.getgid())"),
    Attack("changing times", "os.utime(SECRET)"),
    Attack("truncating", "os.truncate(SECRET, 0)"),
    Attack("extended attributes", "os.setxattr(SECRET, 'user.x', b'x')"),
    Attack("chroot", "os.mkdir('r'); os.chroot('r')"),
    Attack("file by handle", "syscall(OPEN_BY_HANDLE_AT, -100, b'x' * 16, 0)"),
    Attack("device node", "os.mknod('disk', 0o60600, os.makedev(8, 0))"),
    Attack("the kernel's files", "open('/proc/sys/kernel/hostname').read(); open('/sys/kernel/uevent_helper')"),
)

_PROCESSES = (
    Attack("environment secret", "assert 'COHORT_DECOY' in os.environ", essential=True),
    Attack("parent's environment", "assert b'=' in open(f'/proc/{PARENT}/environ', 'rb').read()", essential=True),
    Attack("anyone's environment", "assert any(open(f'/proc/{n}/environ', 'rb').read(1) for n in others())"),
    Attack("other processes' names", "assert [open(f'/proc/{n}/cmdline').read() for n in others()]"),
    Attack("its own process in /proc", "open('/proc/self/status').read(); open('/proc/self/mem', 'rb')"),
    Attack("parent's memory", "open(f'/proc/{PARENT}/mem', 'rb')"),
    Attack("memory by process_vm_readv", "syscall(PROCESS_VM_READV, PARENT, 0, 0, 0, 0, 0)"),
    Attack("ptrace", "syscall(PTRACE, 16, DECOY, 0, 0)", essential=True),
    Attack("tracing its parent", "syscall(PTRACE, 0x4206, os.getppid() or 1, 0, 0)"),
    Attack("signal to the pool", "os.kill(PARENT, 0)"),
    Attack("signal to a process", "os.kill(DECOY, 0)", essential=True),
    Attack("signal to its parent", "os.kill(os.getppid() or 1, 0)"),
    Attack("signal to all", "os.kill(-1, 0)"),
    Attack("signal to a group", "os.killpg(os.getpgid(DECOY), 0)"),
    Attack(
        "signal by pidfd",
        """
fd = os.pidfd_open(DECOY)
syscall(PIDFD_SEND_SIGNAL, fd, 0, 0, 0)
""",
    ),
    Attack(
        "signal by descriptor owner",
        """
import fcntl
r, w = os.pipe()
fcntl.fcntl(r, fcntl.F_SETOWN, DECOY)
""",
    ),
    Attack(
        "another's limits",
        """
import resource
resource.prlimit(DECOY, resource.RLIMIT_CPU, (1, 1))
""",
    ),
    Attack(
        "raising its limits",
        """
import resource
resource.setrlimit(resource.RLIMIT_NPROC, (9999, 9999))
""",
    ),
    Attack("another's priority", "os.setpriority(os.PRIO_PROCESS, DECOY, 19)"),
    Attack("another's cores", "os.sched_setaffinity(DECOY, {0})"),
    Attack("becoming root", "os.setuid(0)"),
    Attack(
        "a shell",
        """
import subprocess
assert subprocess.run(['/bin/sh', '-c', 'echo hi'], capture_output=True).stdout
""",
        essential=True,
    ),
    Attack("exec", "os.execv('/bin/sh', ['sh', '-c', 'echo REACHED'])"),
    Attack("posix_spawn", "os.posix_spawn('/bin/true', ['true'], {})"),
    Attack(
        "multiprocessing",
        """
import multiprocessing as m
p = m.Process(target=print)
p.start()
""",
    ),
    Attack("fork", "if os.fork() == 0: os._exit(0)", essential=True),
    Attack(
        "a daemon that stays",
        """
if os.fork() == 0:
    os.setsid()
    os.fork()
    time.sleep(3)
""",
    ),
    Attack(
        "zombies",
        """
for _ in range(20):
    if os.fork() == 0: os._exit(0)
""",
    ),
    Attack("clone3", "syscall(CLONE3, ctypes.create_string_buffer(88), 88)"),
    Attack(
        "inherited descriptors",
        """
seen = []
for n in range(3, 256):
    try: seen.append((n, os.fstat(n).st_mode & 0o170000))
    except OSError: pass
assert [s for s in seen if s[1] != 0o010000 and s[1] != 0o040000], seen
""",
    ),
)

_KERNEL = (
    Attack("io_uring", "syscall(IO_URING_SETUP, 4, ctypes.create_string_buffer(120))", essential=True),
    Attack("bpf", "syscall(BPF, 0, ctypes.create_string_buffer(72), 72)"),
    Attack("perf events", "syscall(PERF_EVENT_OPEN, ctypes.create_string_buffer(120), 0, -1, -1, 0)"),
    Attack("keyring", "syscall(KEYCTL, 0, -3, 1)"),
    Attack("userfaultfd", "syscall(USERFAULTFD, 0)"),
    Attack("namespaces", "syscall(UNSHARE, 0x10000000)", essential=True),
    Attack("entering a namespace", "syscall(SETNS, os.open('/proc/1/ns/net', os.O_RDONLY), 0)"),
    Attack("mount", "assert libc.mount(b'none', b'.', b'tmpfs', 0, None) == 0"),
    Attack("memory file", "os.memfd_create('x')"),
    Attack("System V memory", "syscall(SHMGET, 0, 4096, 0o1600)"),
    Attack("message queue", "syscall(MQ_OPEN, b'x', 0o102, 0o600, None)"),
    Attack("personality", "syscall(PERSONALITY, 0x0040000)"),
    Attack("i386 and x32 calls", "syscall(0x40000000 + 39)"),
    Attack("dropping the filter", "syscall(PRCTL, 22, 0, 0, 0, 0)"),
    Attack("becoming readable", "syscall(PRCTL, 4, 1, 0, 0, 0)"),
)

_BOMBS = (
    Attack(
        "fork bomb",
        """
for _ in range(200):
    if os.fork() == 0: time.sleep(1); os._exit(0)
""",
        essential=True,
    ),
    Attack(
        "thread bomb",
        """
gate = threading.Event()
count = 0
try:
    while count < 3 * MAX_PROCESSES:
        threading.Thread(target=gate.wait, daemon=True).start()
        count += 1
except RuntimeError: pass
gate.set()
assert count > MAX_PROCESSES, count
""",
        essential=True,
    ),
    Attack(
        "memory bomb",
        """
b = bytearray(4 * MEMORY_MIB << 20)
assert len(b)
""",
        essential=True,
    ),
    Attack(
        "memory bit by bit",
        """
kept = []
for _ in range(4 * MEMORY_MIB): kept.append(b'x' * (1 << 20))
""",
    ),
    Attack(
        "one large file",
        """
f = open('big', 'wb')
for _ in range(4 * FILE_MIB): f.write(b'x' * (1 << 20))
f.close()
assert os.path.getsize('big') > FILE_MIB << 20
""",
    ),
    Attack(
        "many files",
        """
for n in range(8):
    with open(f'f{n}', 'wb') as f: f.write(b'x' * (FILE_MIB << 19))
time.sleep(2)
assert sum(os.path.getsize(f'f{n}') for n in range(8)) > 3 * FILE_MIB << 20
""",
    ),
    Attack("many empty files", "for n in range(100_000): open(f'f{n}', 'w').close()"),
    Attack(
        "nested folders",
        """
for _ in range(5000):
    os.mkdir('d'); os.chdir('d')
""",
    ),
    Attack("infinite loop", "while True: pass", ends=("time",)),
    Attack(
        "sleeping on",
        """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True: time.sleep(60)
""",
        ends=("time",),
    ),
    Attack("output bomb", "while True: sys.stdout.write('x' * 65536)", ends=("time",)),
    Attack(
        "closing everything",
        """
os.closerange(0, 256)
while True: pass
""",
        ends=("time",),
    ),
    Attack(
        "catching the CPU limit",
        """
import signal
signal.signal(signal.SIGXCPU, lambda *_: None)
while True: pass
""",
        ends=("time",),
    ),
    Attack("killing itself", "os.kill(os.getpid(), 9)", ends=("memory",)),
    Attack("a wild pointer", "ctypes.string_at(8)", ends=("crashed",)),
    Attack(
        "deep recursion",
        """
sys.setrecursionlimit(10**9)
class A:
    def __getattr__(self, n): return getattr(self, n)
A().x
""",
        ends=("crashed", "memory", "exception", "time"),
    ),
)

ATTACKS = (*_NETWORK, *_FILES, *_PROCESSES, *_KERNEL, *_BOMBS)
ESSENTIAL = tuple(attack for attack in ATTACKS if attack.essential)
