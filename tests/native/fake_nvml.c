/* Fake NVML for tests. gcc -shared -fPIC -O2 -Wl,-soname,libnvidia-ml.so.1 -o libnvidia-ml.so.1 fake_nvml.c -lpthread
 * State file: $FAKE_NVML_FILE (re-read on every call). Lines:  driver=550.54.15
 *   gpu.<i>.<key>=<value>   keys: uuid name bus mem_total mem_used util mem_util temp power power_limit
 *                            sm_clock mem_clock ecc_corr ecc_uncorr pcie_tx pcie_rx lost(0/1) link_gen link_width fan
 *   gpu.<i>.proc=<pid>:<bytes>     (repeatable)       count=<n>     init_error=<nvmlReturn>
 *   gpu.<i>.mig=1 and gpu.<i>.slice=<uuid>,<profile>,<gi>,<ci>,<start>,<size>,<total>,<used>   (repeatable)
 *   gpu.<i>.util_error=<nvmlReturn>   gpu.<i>.power_error=…   gpu.<i>.temp_error=…      crash=1 (segfault)   hang=1
 *   gpu.<i>.links=<n>,<peer index>    active NVLinks, all to one peer                                         */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <pthread.h>
#include <unistd.h>
typedef int R; typedef unsigned int u; typedef unsigned long long ull; typedef void* D;
enum {OK=0,UNINIT=1,INVAL=2,NOSUP=3,NOPERM=4,NOTFOUND=6,INSUF=7,DRV=9,LOST=15,UNKNOWN=999};
#define X __attribute__((visibility("default")))
static int refs=0; static char buf[1<<20]; static pthread_mutex_t mu=PTHREAD_MUTEX_INITIALIZER;
static void load(void){ const char*f=getenv("FAKE_NVML_FILE"); buf[0]=0; if(!f)return; FILE*h=fopen(f,"r"); if(!h)return; size_t n=fread(buf,1,sizeof buf-1,h); buf[n]=0; fclose(h); }
/* value of `key` (nth match), or def */
static int get_n(const char*key,int nth,char*out,size_t sz,const char*def){ pthread_mutex_lock(&mu); load(); size_t k=strlen(key); int r=0; char*p=buf;
  while(p&&*p){ if(!strncmp(p,key,k)&&p[k]=='='&&nth--==0){ char*e=strpbrk(p+k+1,"\r\n"); size_t n=e?(size_t)(e-(p+k+1)):strlen(p+k+1); if(n>=sz)n=sz-1; memcpy(out,p+k+1,n); out[n]=0; r=1; break;} p=strchr(p,'\n'); if(p)p++; }
  pthread_mutex_unlock(&mu); if(!r&&def){ snprintf(out,sz,"%s",def); } return r; }
static ull num(const char*key,ull def){ char b[64]; return get_n(key,0,b,sizeof b,NULL)?strtoull(b,0,0):def; }
static ull gnum(D d,const char*k,ull def){ char key[64]; snprintf(key,sizeof key,"gpu.%d.%s",(int)((size_t)d-1),k); return num(key,def); }
static int gstr(D d,const char*k,char*o,size_t n,const char*def){ char key[64]; snprintf(key,sizeof key,"gpu.%d.%s",(int)((size_t)d-1),k); return get_n(key,0,o,n,def); }
static int count(void){ return (int)num("count",4); }
#define ISMIG(d) ((size_t)(d)>=0x10000&&(size_t)(d)<0x20000000)
#define CHK(d) do{ if(!refs)return UNINIT; if(ISMIG(d))return NOSUP; if((size_t)(d)<1||(int)(size_t)(d)>count())return INVAL; if(gnum(d,"lost",0))return LOST; }while(0)
typedef struct{char uuid[96],profile[32];u gi,ci,start,size;ull total,used;}S;
/* slice number n of card (index from 0), 1 when there is one */
static int slice(int card,int n,S*s){ char key[64],b[320]; snprintf(key,64,"gpu.%d.slice",card); if(!get_n(key,n,b,sizeof b,NULL))return 0; return sscanf(b,"%95[^,],%31[^,],%u,%u,%u,%u,%llu,%llu",s->uuid,s->profile,&s->gi,&s->ci,&s->start,&s->size,&s->total,&s->used)==8; }
static int mslice(D d,S*s){ size_t v=(size_t)d-0x10000; return slice((int)(v/256),(int)(v%256),s); }
X R nvmlInit_v2(void){ int e=(int)num("init_error",0); if(e)return e; refs++; return OK; }
X R nvmlInit(void){ return nvmlInit_v2(); }
X R nvmlInitWithFlags(u f){ (void)f; return nvmlInit_v2(); }
X R nvmlShutdown(void){ if(!refs)return UNINIT; refs--; return OK; }
X const char* nvmlErrorString(R r){ switch(r){case 0:return "Success";case 1:return "Uninitialized";case 2:return "Invalid Argument";case 3:return "Not Supported";case 4:return "Insufficient Permissions";case 6:return "Not Found";case 7:return "Insufficient Size";case 9:return "Driver Not Loaded";case 15:return "GPU is lost";} return "Unknown Error"; }
static R put(const char*s,char*o,u n){ if(strlen(s)+1>n)return INSUF; strcpy(o,s); return OK; }
X R nvmlSystemGetDriverVersion(char*o,u n){ char b[80]; if(!refs)return UNINIT; get_n("driver",0,b,sizeof b,"550.54.15"); return put(b,o,n); }
X R nvmlSystemGetNVMLVersion(char*o,u n){ if(!refs)return UNINIT; return put("12.550.54.15",o,n); }
X R nvmlSystemGetCudaDriverVersion_v2(int*v){ if(!refs)return UNINIT; *v=12040; return OK; }
X R nvmlSystemGetCudaDriverVersion(int*v){ return nvmlSystemGetCudaDriverVersion_v2(v); }
X R nvmlDeviceGetCount_v2(u*c){ if(!refs)return UNINIT; if(num("crash",0)){ volatile int*p=0; *p=1; } while(num("hang",0))usleep(100000); *c=count(); return OK; }
X R nvmlDeviceGetCount(u*c){ return nvmlDeviceGetCount_v2(c); }
X R nvmlDeviceGetHandleByIndex_v2(u i,D*d){ if(!refs)return UNINIT; if((int)i>=count())return INVAL; *d=(D)(size_t)(i+1); if(gnum(*d,"lost",0)==2)return LOST; return OK; }
X R nvmlDeviceGetHandleByIndex(u i,D*d){ return nvmlDeviceGetHandleByIndex_v2(i,d); }
X R nvmlDeviceGetUUID(D d,char*o,u n){ if(ISMIG(d)){ S s; return mslice(d,&s)?put(s.uuid,o,n):INVAL; } CHK(d); char b[96],f[96]; snprintf(f,sizeof f,"GPU-fa4e0000-0000-0000-0000-%012d",(int)(size_t)d-1); gstr(d,"uuid",b,sizeof b,f); return put(b,o,n); }
X R nvmlDeviceGetHandleByUUID(const char*uu,D*d){ if(!refs)return UNINIT; for(int i=1;i<=count();i++){ char b[96]; if(nvmlDeviceGetUUID((D)(size_t)i,b,96)==OK&&!strcmp(b,uu)){*d=(D)(size_t)i;return OK;} } return NOTFOUND; }
X R nvmlDeviceGetIndex(D d,u*i){ CHK(d); *i=(u)(size_t)d-1; return OK; }
X R nvmlDeviceGetMinorNumber(D d,u*i){ CHK(d); *i=(u)(size_t)d-1; return OK; }
X R nvmlDeviceGetName(D d,char*o,u n){ if(ISMIG(d)){ S s; char b[96]; if(!mslice(d,&s))return INVAL; snprintf(b,96,"NVIDIA A100-SXM4-80GB MIG %s",s.profile); return put(b,o,n); } CHK(d); char b[96]; gstr(d,"name",b,sizeof b,"NVIDIA A100-SXM4-80GB"); return put(b,o,n); }
X R nvmlDeviceGetSerial(D d,char*o,u n){ CHK(d); char b[32]; snprintf(b,32,"165402%07d",(int)(size_t)d); return put(b,o,n); }
typedef struct{ull total,free,used;}M1; typedef struct{u version;ull total,reserved,free,used;}M2;
X R nvmlDeviceGetMemoryInfo(D d,M1*m){ if(ISMIG(d)){ S s; if(!mslice(d,&s))return INVAL; m->total=s.total; m->used=s.used; m->free=s.total-s.used; return OK; } CHK(d); if(gnum(d,"mem_error",0))return (R)gnum(d,"mem_error",0); m->total=gnum(d,"mem_total",85899345920ull); m->used=gnum(d,"mem_used",0); m->free=m->total-m->used; return OK; }
X R nvmlDeviceGetMemoryInfo_v2(D d,M2*m){ if(ISMIG(d)){ S s; if(!mslice(d,&s))return INVAL; m->total=s.total; m->used=s.used; m->reserved=0; m->free=s.total-s.used; return OK; } CHK(d); M1 a; R r=nvmlDeviceGetMemoryInfo(d,&a); if(r)return r; m->total=a.total; m->used=a.used; m->reserved=gnum(d,"mem_reserved",0); m->free=a.total-a.used-m->reserved; return OK; }
typedef struct{u gpu,memory;}U; X R nvmlDeviceGetUtilizationRates(D d,U*x){ CHK(d); if(gnum(d,"mig",0))return NOSUP; if(gnum(d,"util_error",0))return (R)gnum(d,"util_error",0); x->gpu=gnum(d,"util",0); x->memory=gnum(d,"mem_util",0); return OK; }
X R nvmlDeviceGetTemperature(D d,u s,u*t){ CHK(d); if(gnum(d,"temp_error",0))return (R)gnum(d,"temp_error",0); if(s!=0)return INVAL; *t=gnum(d,"temp",35); return OK; }
typedef struct{u version; int sensor; int temp;}TV; X R nvmlDeviceGetTemperatureV(D d,TV*t){ CHK(d); t->temp=gnum(d,"temp",35); return OK; }
X R nvmlDeviceGetTemperatureThreshold(D d,u k,u*t){ CHK(d); *t=k==0?92:89; return OK; }
X R nvmlDeviceGetPowerUsage(D d,u*p){ CHK(d); if(gnum(d,"power_error",0))return (R)gnum(d,"power_error",0); *p=gnum(d,"power",60000); return OK; }
X R nvmlDeviceGetEnforcedPowerLimit(D d,u*p){ CHK(d); *p=gnum(d,"power_limit",400000); return OK; }
X R nvmlDeviceGetPowerManagementLimit(D d,u*p){ return nvmlDeviceGetEnforcedPowerLimit(d,p); }
X R nvmlDeviceGetTotalEnergyConsumption(D d,ull*p){ CHK(d); *p=gnum(d,"energy",0); return OK; }
X R nvmlDeviceGetFanSpeed(D d,u*p){ CHK(d); (void)p; return NOSUP; }
X R nvmlDeviceGetPerformanceState(D d,int*p){ CHK(d); *p=(int)gnum(d,"pstate",0); return OK; }
X R nvmlDeviceGetCurrentClocksEventReasons(D d,ull*p){ CHK(d); *p=gnum(d,"throttle",0); return OK; }
X R nvmlDeviceGetCurrentClocksThrottleReasons(D d,ull*p){ return nvmlDeviceGetCurrentClocksEventReasons(d,p); }
typedef struct{char legacy[16];u domain,bus,device,devId,subId;char busId[32];}P;
X R nvmlDeviceGetPciInfo_v3(D d,P*p){ CHK(d); memset(p,0,sizeof*p); int i=(int)(size_t)d; p->bus=i; p->devId=0x20b210de; p->subId=0x147f10de; char b[32],f[32]; snprintf(f,32,"00000000:%02X:00.0",i); gstr(d,"bus",b,32,f); strcpy(p->busId,b); snprintf(p->legacy,16,"0000:%02X:00.0",i); return OK; }
X R nvmlDeviceGetPciInfo_v2(D d,P*p){ return nvmlDeviceGetPciInfo_v3(d,p); }
X R nvmlDeviceGetPciInfo(D d,P*p){ return nvmlDeviceGetPciInfo_v3(d,p); }
typedef struct{u pid;ull used;u gi,ci;}PR;
X R nvmlDeviceGetComputeRunningProcesses_v3(D d,u*n,PR*a){ if(ISMIG(d)){ *n=0; return OK; } CHK(d); char key[64],b[64]; snprintf(key,64,"gpu.%d.proc",(int)(size_t)d-1); u c=0; while(get_n(key,c,b,64,NULL))c++; if(!c){*n=0;return OK;} if(*n<c||!a){*n=c;return INSUF;} for(u i=0;i<c;i++){ get_n(key,i,b,64,NULL); char*q=strchr(b,':'); a[i].pid=atoi(b); a[i].used=q?strtoull(q+1,0,0):0; a[i].gi=a[i].ci=0xFFFFFFFFu;} *n=c; return OK; }
X R nvmlDeviceGetGraphicsRunningProcesses_v3(D d,u*n,PR*a){ if(ISMIG(d)){ *n=0; return OK; } CHK(d); (void)a; *n=0; return OK; }
X R nvmlDeviceGetMPSComputeRunningProcesses_v3(D d,u*n,PR*a){ CHK(d); (void)a; *n=0; return OK; }
X R nvmlDeviceGetMigMode(D d,u*c,u*p){ CHK(d); char b[8]; if(!gstr(d,"mig",b,8,NULL))return NOSUP; *c=*p=(u)gnum(d,"mig",0); return OK; }
X R nvmlDeviceGetMaxMigDeviceCount(D d,u*n){ CHK(d); *n=7; return OK; }
X R nvmlDeviceGetMigDeviceHandleByIndex(D d,u i,D*m){ CHK(d); S s; if(!slice((int)(size_t)d-1,(int)i,&s))return NOTFOUND; *m=(D)(0x10000+((size_t)d-1)*256+i); return OK; }
X R nvmlDeviceGetGpuInstanceId(D d,u*v){ S s; if(!ISMIG(d)||!mslice(d,&s))return INVAL; *v=s.gi; return OK; }
X R nvmlDeviceGetComputeInstanceId(D d,u*v){ S s; if(!ISMIG(d)||!mslice(d,&s))return INVAL; *v=s.ci; return OK; }
typedef struct{D device;u id,profileId;struct{u start,size;}placement;}GI;
#include "fake_nvml_mig.h"
static int links(D d,int*peer){ char b[32]; if(!gstr(d,"links",b,32,NULL))return 0; int n=0; *peer=-1; sscanf(b,"%d,%d",&n,peer); return n; }
X R nvmlDeviceGetNvLinkState(D d,u l,u*v){ CHK(d); int p,n=links(d,&p); if(!n)return NOSUP; if((int)l>=n)return INVAL; *v=1; return OK; }
X R nvmlDeviceGetTotalEccErrors(D d,u t,u ct,ull*v){ CHK(d); (void)ct; *v=gnum(d,t==1?"ecc_uncorr":"ecc_corr",0); return OK; }
X R nvmlDeviceGetEccMode(D d,u*c,u*p){ CHK(d); *c=*p=1; return OK; }
X R nvmlDeviceGetPcieThroughput(D d,u c,u*v){ CHK(d); *v=gnum(d,c==0?"pcie_tx":"pcie_rx",0); return OK; }
X R nvmlDeviceGetCurrPcieLinkGeneration(D d,u*v){ CHK(d); *v=gnum(d,"link_gen",4); return OK; }
X R nvmlDeviceGetMaxPcieLinkGeneration(D d,u*v){ CHK(d); *v=4; return OK; }
X R nvmlDeviceGetCurrPcieLinkWidth(D d,u*v){ CHK(d); *v=gnum(d,"link_width",16); return OK; }
X R nvmlDeviceGetMaxPcieLinkWidth(D d,u*v){ CHK(d); *v=16; return OK; }
X R nvmlDeviceGetPcieReplayCounter(D d,u*v){ CHK(d); *v=gnum(d,"pcie_replay",0); return OK; }
X R nvmlDeviceGetClockInfo(D d,u t,u*v){ CHK(d); *v=t==2?gnum(d,"mem_clock",1593):gnum(d,"sm_clock",1410); return OK; }
X R nvmlDeviceGetMaxClockInfo(D d,u t,u*v){ CHK(d); *v=t==2?1593:1410; return OK; }
X R nvmlDeviceGetNvLinkRemotePciInfo_v2(D d,u l,P*o){ CHK(d); int p,n=links(d,&p); if((int)l>=n||p<0)return INVAL; return nvmlDeviceGetPciInfo_v3((D)(size_t)(p+1),o); }
