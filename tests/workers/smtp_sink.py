#!/usr/bin/env python3
"""Accepts mail until its standard input ends: smtp_sink.py FILE. Prints its port, and writes each mail to FILE as one line of JSON."""

import asyncio
import email
import email.policy
import json
import sys

from aiosmtpd.smtp import SMTP


class Handler:
    async def handle_DATA(self, server, session, envelope):
        mail = email.message_from_bytes(envelope.content, policy=email.policy.default)
        told = {
            "to": envelope.rcpt_tos,
            "from": envelope.mail_from,
            "headers": [[name.lower(), str(value)] for name, value in mail.items()],
            "defects": [repr(defect) for defect in mail.defects],
            "body": mail.get_content().replace("\r\n", "\n"),
        }
        with open(sys.argv[1], "a") as mails:
            mails.write(json.dumps(told) + "\n")
        return "250 OK"


async def main():
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: SMTP(Handler(), enable_SMTPUTF8=True), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


asyncio.run(main())
