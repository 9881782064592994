"""System call numbers of x86_64 and aarch64, and which of them a Python program needs.

From Linux's unistd_64.h and asm-generic/unistd.h; None where the machine has no such call. Only x86_64 was run.
"""

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH of each machine, in the order of the columns below."""

_FILES: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "close_range": (436, 436), "fstat": (5, 80), "lseek": (8, 62),
    "pread64": (17, 67), "pwrite64": (18, 68), "readv": (19, 65), "writev": (20, 66), "preadv": (295, 69),
    "pwritev": (296, 70), "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439), "stat": (4, None),
    "lstat": (6, None), "newfstatat": (262, 79), "statx": (332, 291), "statfs": (137, 43), "fstatfs": (138, 44),
    "getdents64": (217, 61), "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50), "umask": (95, 166),
    "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "unlink": (87, None), "unlinkat": (263, 35),
    "readlink": (89, None), "readlinkat": (267, 78), "flock": (73, 32), "fsync": (74, 82), "fdatasync": (75, 83),
    "ftruncate": (77, 46), "fallocate": (285, 47), "fadvise64": (221, 223), "sendfile": (40, 71), "dup": (32, 23),
    "dup2": (33, None), "dup3": (292, 24),
}  # fmt: skip
_WAITING: dict[str, tuple[int | None, int | None]] = {
    "pipe": (22, None), "pipe2": (293, 59), "eventfd": (284, None), "eventfd2": (290, 19), "select": (23, None),
    "pselect6": (270, 72), "poll": (7, None), "ppoll": (271, 73), "epoll_create": (213, None),
    "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22),
    "epoll_pwait2": (441, 441), "recvfrom": (45, 207), "shutdown": (48, 210), "getsockname": (51, 204),
    "getpeername": (52, 205), "pause": (34, None), "nanosleep": (35, 101), "clock_nanosleep": (230, 115),
    "futex": (202, 98), "restart_syscall": (219, 128), "setitimer": (38, 103), "getitimer": (36, 102),
    "alarm": (37, None),
}  # fmt: skip
_PROCESS: dict[str, tuple[int | None, int | None]] = {
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "mremap": (25, 216),
    "msync": (26, 227), "madvise": (28, 233), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139), "rt_sigtimedwait": (128, 137), "rt_sigpending": (127, 136),
    "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132), "sched_yield": (24, 124), "sched_getaffinity": (204, 123),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "gettimeofday": (96, 169), "time": (201, None),
    "times": (100, 153), "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173), "getuid": (102, 174),
    "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177), "getgroups": (115, 158),
    "getresuid": (118, 148), "getresgid": (120, 150), "getpgrp": (111, None), "getpgid": (121, 155),
    "getsid": (124, 156), "getrlimit": (97, 163), "getrusage": (98, 165), "sysinfo": (99, 179), "uname": (63, 160),
    "getcpu": (309, 168), "getrandom": (318, 278), "exit": (60, 93), "exit_group": (231, 94),
    "set_robust_list": (273, 99), "get_robust_list": (274, 100), "set_tid_address": (218, 96), "rseq": (334, 293),
    "arch_prctl": (158, None),
}  # fmt: skip
_BY_ARGUMENT: dict[str, tuple[int | None, int | None]] = {
    "kill": (62, 129), "tgkill": (234, 131), "clone": (56, 220), "clone3": (435, 435), "prctl": (157, 167),
    "ioctl": (16, 29), "fcntl": (72, 25), "prlimit64": (302, 261), "socketpair": (53, 199), "sendto": (44, 206),
    "open": (2, None), "openat": (257, 56),
}  # fmt: skip

ALLOWED = (*_FILES, *_WAITING, *_PROCESS)
"""Allowed whatever their arguments are."""
SYSCALLS = _FILES | _WAITING | _PROCESS | _BY_ARGUMENT
"""Name -> number on x86_64 and on aarch64."""
