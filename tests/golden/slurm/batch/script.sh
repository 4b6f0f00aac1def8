#!/bin/sh
# transom: job 12, attempt 1
export TRANSOM_JOB_ID=12
export TRANSOM_X='a b'
exec /opt/transom/bin/python -m transomd.launch --folder '/home/alice/my runs/12' --say 'it'"'"'s'
