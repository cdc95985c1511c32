"""What the client says itself, in English and Chinese; the installation's own texts come in the reader's language."""

from __future__ import annotations

import os
import sys
from typing import Any

CHINESE = {
    "connection lost ({why}); trying again": "连接中断({why}),正在重试",
    "sent {files} files, {kib} KiB": "已发送 {files} 个文件,{kib} KiB",
    "sent {files} files, {kib} KiB; {skipped} links left out": (
        "已发送 {files} 个文件,{kib} KiB;{skipped} 个链接未发送"
    ),
    "{ref} asked": "{ref} 已提交",
    "{ref} waits for approval by: {who}": "{ref} 等待审批:{who}",
    "{ref} is in line, position {position} of {of}: {reason}": "{ref} 排队中,第 {position}/{of} 位:{reason}",
    "{ref} is in line: {reason}": "{ref} 排队中:{reason}",
    "{ref} was returned: change it on its page": "{ref} 已被退回,请在页面上修改",
    "{ref} needs your consent to another amount: {url}": "{ref} 的数量有变,需要您同意:{url}",
    "{ref} starts on {nodes}": "{ref} 正在启动,节点 {nodes}",
    "{ref} runs on {nodes}": "{ref} 正在运行,节点 {nodes}",
    "{ref} goes back in line ({why})": "{ref} 重新排队({why})",
    "{ref} ended: {why}": "{ref} 已结束:{why}",
    "{ref} ended: {why}, exit code {code}": "{ref} 已结束:{why},退出码 {code}",
    "released; Ctrl-C once more to stop watching": "正在释放;再按一次 Ctrl-C 停止跟踪",
    "it goes on without this terminal; see it again with: gpupool attach {ref}": (
        "任务继续运行;重新查看:gpupool attach {ref}"
    ),
    "brought back {files} files": "已取回 {files} 个文件",
    "results could not be brought back: {why}": "结果未能取回:{why}",
    "try again with: gpupool cp {ref}:. .": "重试:gpupool cp {ref}:. .",
    "signed in at {url} as {name}; kept in {path}": "已登录 {url}:{name};保存于 {path}",
    "not signed in: gpupool login URL": "尚未登录:gpupool login 地址",
    "token (made under your name → Tokens, with the scopes read and request): ": (
        "令牌(在“您的名字 → 令牌”中创建,范围 read 和 request):"
    ),
    "the address begins with https:// or http://": "地址须以 https:// 或 http:// 开头",
    "no such request or allocation: {ref}": "没有这样的申请或分配:{ref}",
    "you have no running work; name it (R-17)": "您没有正在运行的任务;请指明(R-17)",
    "several of yours run; name one: {refs}": "您有多个任务在运行,请指明:{refs}",
    "forwarding 127.0.0.1:{here} to port {there} of {ref}; Ctrl-C ends it": (
        "127.0.0.1:{here} 转发到 {ref} 的端口 {there};按 Ctrl-C 结束"
    ),
    "connection {n}: {why}": "连接 {n}:{why}",
    "connection lost": "连接中断",
    "one side is REF:PATH, the other a path here": "一侧为 REF:PATH,另一侧为本机路径",
    "copied {files} files, {kib} KiB": "已复制 {files} 个文件,{kib} KiB",
    "no replica of {ref} is well": "{ref} 没有健康的副本",
    "{ref}: going over to another replica": "{ref}:正在切换到另一副本",
    "nothing to show": "没有可显示的内容",
    "released": "已释放",
    "withdrawn": "已撤回",
    "the folder is refused: {why}": "文件夹未被接受:{why}",
    "GPU count: a whole number, or a fraction below 1 in thousandths": "GPU 数:整数,或小于 1 的三位小数",
    "a duration: 30m, 4h, 2d": "时长:30m、4h、2d",
}


def language() -> str:
    """``zh-hans`` or ``en``, by GPUPOOL_LANGUAGE or the locale."""
    for name in ("GPUPOOL_LANGUAGE", "LC_ALL", "LC_MESSAGES", "LANG"):
        value = os.environ.get(name, "").lower()
        if value:
            return "zh-hans" if value.startswith("zh") else "en"
    return "en"


def text(words: str, **values: Any) -> str:
    """Words in the reader's language with their values."""
    found = CHINESE.get(words, words) if language() == "zh-hans" else words
    return found.format(**values)


def say(words: str, **values: Any) -> None:
    """One line for the person, on standard error: standard output is the work's own."""
    print(f"gpupool: {text(words, **values)}", file=sys.stderr, flush=True)
